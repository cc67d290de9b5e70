"""Local steps (`--strategy local`) in the trainer; their rules are in utils/local/."""
