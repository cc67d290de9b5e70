"""Local gradient methods: workers that step by themselves and average their parameters at times."""
