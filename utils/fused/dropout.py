"""The random numbers of dropout, drawn as utils/models/dropout.py says."""

import torch
from torch import Tensor

LEVELS = 1 << 16


def draw_bits(x: Tensor, rate: float) -> tuple[Tensor, int, float]:
    """(int16 of x's shape, from which of its values on an element is kept, what the kept ones are
    multiplied by), on a CPU."""
    dropped = round(rate * LEVELS)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    return bits, dropped - LEVELS // 2, LEVELS / (LEVELS - dropped)


def draw_mask(x: Tensor, rate: float) -> tuple[Tensor | None, float]:
    """(uint8 of x's shape, 1 for what is kept, and the factor of that); of rate 0 None."""
    if rate == 0:
        return None, 1.0
    if x.device.type == "cpu":
        bits, first, factor = draw_bits(x, rate)
        return (bits >= first).view(torch.uint8), factor  # bool takes longer to convert
    return torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - rate), 1 / (1 - rate)
