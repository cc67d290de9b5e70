"""Trains classifiers of pictures and texts, from a laptop's CPU to many nodes of GPUs."""
