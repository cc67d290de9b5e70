"""MADGRAD: Defazio and Jelassi, "Adaptivity without compromise: a momentumized, adaptive, dual
averaged gradient method for stochastic optimization" (2022), arXiv:2101.11075.

    g <- g + weight_decay w,   a = lr sqrt(t)
    s <- s + a g,   v <- v + a g^2
    z = w_0 - s / (cbrt(v) + eps),   w <- m w + (1 - m) z

where t counts steps from 1 and w_0 is the weight at the start. As in its authors' program lr is
larger by eps, and without momentum w_0 is not kept but recovered from the present weight.

timm's class computes the same, but launches some fifty times as many kernels for a step on a GPU,
and its steps, which the host counts, fit into no CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .entry import LINEAR, OptimizerEntry, Range

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make(groups: list[dict], *, lr: float, momentum: float) -> Optimizer:
    from .madgrad_steps import Madgrad

    return Madgrad(groups, lr=lr, momentum=momentum)


MADGRAD = OptimizerEntry(
    summary="dual averaging with momentum",
    make=make,
    # Those of CIFAR-10 in its paper.
    lr=2.5e-4,
    weight_decay=1e-4,
    momentum=0.9,
    nesterov=False,
    capturable=True,
    scaling=LINEAR,
    ranges={
        "lr": (Range(2e-5, 5e-3, grid=(1e-4, 2.5e-4, 1e-3)),),
        "weight_decay": (Range(1e-5, 0.01, grid=(1e-4, 5e-4, 2e-3)),),
    },
)
