"""Stochastic gradient descent with momentum, by default Nesterov's.

The learning rate is per unit of gradient, to which the weight times the weight decay is added.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .entry import LINEAR, OptimizerEntry, Range, optimizer_flag

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class SgdFlags:
    nesterov: bool = optimizer_flag(True, "Nesterov's momentum with sgd; without it, the plain one")


def make(
    groups: list[dict],
    *,
    lr: float,
    momentum: float,
    nesterov: bool = True,
    kind: Callable[..., "Optimizer"] | None = None,
) -> "Optimizer":
    """`kind`: the class; None: PyTorch's."""
    import torch

    kind = kind or functools.partial(torch.optim.SGD, fused=True)
    optimizer = kind(groups, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    if momentum:
        # The momentum is there from the start: when the very first step is left out because its
        # gradient is not finite, the fused kernel would leave this memory as it was allocated.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


SGD = OptimizerEntry(
    summary="stochastic gradient descent with Nesterov momentum",
    make=make,
    lr=0.1,
    weight_decay=5e-4,
    momentum=0.9,
    flags=SgdFlags,
    capturable=True,
    scaling=LINEAR,
    ranges={
        "lr": (Range(0.01, 1.0, grid=(0.03, 0.1, 0.3)),),
        "weight_decay": (Range(1e-5, 0.01, grid=(1e-4, 5e-4, 2e-3)),),
    },
)
