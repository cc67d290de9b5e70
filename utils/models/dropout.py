"""Dropout that does not wait for its random numbers on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    dropped = round(rate * 65536)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    keep = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(bits, dropped - 32768, out=keep)
    return x * keep.mul_(65536 / (65536 - dropped))


class Dropout(nn.Module):
    """`dropout` in training, and nothing in evaluation."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
