"""Mixup and CutMix: how much is mixed, and who decides it."""
