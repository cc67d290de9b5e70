"""Tasks: data set, splits and loaders of a run."""
