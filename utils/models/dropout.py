"""Dropout that does not wait for its random numbers on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.dropout import draw_bits


def dropout(x: Tensor, rate: float) -> Tensor:
    """x with a share of `rate` (0 to below 1) set to 0 and the rest divided by 1 - rate.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (2014).
    On a CPU PyTorch draws a number for each element, which takes several times as long as all else
    of it. Here each draw of 64 bits decides on four elements, 16 bits for each: the rate is
    rounded to a multiple of 2^-16, and the division is by what it then is.
    """
    if rate == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    bits, first, factor = draw_bits(x, rate)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(bits, first, out=keep)
    return x * keep.mul_(factor)


class Dropout(nn.Module):
    """`dropout` in training, and nothing in evaluation."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
