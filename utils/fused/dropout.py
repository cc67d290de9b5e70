"""Random numbers for dropout; utils/models/dropout.py explains how they are drawn."""

import torch
from torch import Tensor

LEVELS = 1 << 16


def draw_bits(x: Tensor, rate: float) -> tuple[Tensor, int, float]:
    """For a CPU: (random int16 of x's shape; threshold that the number of a kept element reaches;
    factor by which kept elements are multiplied)."""
    dropped = round(rate * LEVELS)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    return bits, dropped - LEVELS // 2, LEVELS / (LEVELS - dropped)


def draw_mask(x: Tensor, rate: float) -> tuple[Tensor | None, float]:
    """(uint8 mask of x's shape, 1 where an element is kept, None for rate 0; factor by which kept
    elements are multiplied)."""
    if rate == 0:
        return None, 1.0
    if x.device.type == "cpu":
        bits, threshold, factor = draw_bits(x, rate)
        return (bits >= threshold).view(torch.uint8), factor  # bool is slower to convert
    return torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - rate), 1 / (1 - rate)
