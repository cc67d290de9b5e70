"""Pretrained weights, and the card that describes a trained model."""
