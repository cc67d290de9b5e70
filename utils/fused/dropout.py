"""Dropout with cheap random numbers on a CPU, and the masks of its fused forms."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 1 << 16


def dropout(x: Tensor, rate: float) -> Tensor:
    """Sets each element to 0 with probability `rate`, in [0, 1), and divides the rest by 1 - rate.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (2014).
    On a CPU PyTorch draws a random number for each element, which takes several times as long as
    the rest of dropout. Here each 64-bit draw decides on four elements with 16 bits each. The rate
    is rounded to a multiple of 2^-16, and the division uses the rounded rate.
    """
    if rate == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return F.dropout(x, rate)
    bits, threshold, factor = draw_bits(x, rate)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(bits, threshold, out=keep)
    return x * keep.mul_(factor)


class Dropout(nn.Module):
    """`dropout` in training, the identity in evaluation."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def draw_bits(x: Tensor, rate: float) -> tuple[Tensor, int, float]:
    """For a CPU: (random int16 of x's shape; threshold that the number of a kept element reaches;
    factor by which kept elements are multiplied)."""
    dropped = round(rate * LEVELS)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    return bits, dropped - LEVELS // 2, LEVELS / (LEVELS - dropped)


class Mask(NamedTuple):
    """A dropout mask."""

    kept: Tensor | None  # uint8, 1 where an element is kept; None: nothing is dropped
    factor: float  # by which kept elements are multiplied


def draw_masks(x: Tensor, rate: float, widths: tuple[int, ...]) -> list[Mask]:
    """Masks (rows of x, width), drawn together."""
    if rate == 0:
        return [Mask(None, 1.0)] * len(widths)
    kept = x.new_empty(len(x) * sum(widths), dtype=torch.uint8)
    if x.device.type == "cpu":
        bits, threshold, factor = draw_bits(kept, rate)
        kept = (bits >= threshold).view(torch.uint8)  # bool is slower to convert
    else:
        kept, factor = kept.bernoulli_(1 - rate), 1 / (1 - rate)
    parts = zip(kept.split([len(x) * width for width in widths]), widths, strict=True)
    return [Mask(part.view(-1, width), factor) for part, width in parts]
