"""What a run trains on: data set, splits, loaders."""
