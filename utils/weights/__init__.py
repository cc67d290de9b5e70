"""Weights from elsewhere, and the card that goes with ours."""
