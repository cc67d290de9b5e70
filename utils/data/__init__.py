"""Data sets: where they come from, how they are decoded, and how they are divided."""
