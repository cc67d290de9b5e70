"""What a run tells: console, run folder, metrics, plots."""
