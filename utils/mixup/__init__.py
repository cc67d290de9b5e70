"""Mixup, CutMix and meta-mixup, which learns lambda."""
