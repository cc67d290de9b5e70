"""Architectures: no device, no randomness of training, no collectives."""
