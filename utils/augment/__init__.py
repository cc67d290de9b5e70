"""Augmentations: drawn by a generator that is passed in, applied to a whole batch at once."""
