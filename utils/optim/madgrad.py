"""MADGRAD: Defazio and Jelassi, "Adaptivity without compromise: a momentumized, adaptive, dual
averaged gradient method for stochastic optimization" (2022), arXiv:2101.11075.

The weight times the weight decay is added to the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.optim.entry import LINEAR, OptimizerEntry, Range
from utils.optim.libraries import of_timm

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make(groups: list[dict], *, lr: float, momentum: float) -> Optimizer:
    return of_timm("MADGRAD")(groups, lr=lr, momentum=momentum)


MADGRAD = OptimizerEntry(
    summary="dual averaging with momentum",
    make=make,
    # Those of CIFAR-10 in its paper.
    lr=2.5e-4,
    weight_decay=1e-4,
    momentum=0.9,
    nesterov=False,
    scaling=LINEAR,
    ranges={
        "lr": (Range(2e-5, 5e-3, grid=(1e-4, 2.5e-4, 1e-3)),),
        "weight_decay": (Range(1e-5, 0.01, grid=(1e-4, 5e-4, 2e-3)),),
    },
)
