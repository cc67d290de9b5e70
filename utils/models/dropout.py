"""Dropout with cheap random numbers on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.dropout import draw_bits


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
