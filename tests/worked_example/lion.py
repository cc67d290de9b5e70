"""Lion: Chen et al., "Symbolic discovery of optimization algorithms" (2023), arXiv:2302.06675,
algorithm 2.

The learning rate is the change of every weight in a step; weight decay shrinks a weight by that
rate times the decay. Defaults follow the paper: a tenth of AdamW's rate, ten times its decay.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.optim.entry import OptimizerEntry, Range, optimizer_flag

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class LionFlags:
    lion_beta2: float = optimizer_flag(
        0.99, "How much of lion's momentum a step keeps", low=0, below=1
    )


@functools.cache
def lion_class() -> type:
    """The optimizer's class, made on demand, since PyTorch is not imported with this file."""
    import torch

    from utils.optim.found_inf import HonoursFoundInf

    class PlainLion(torch.optim.Optimizer):
        """State of a parameter: `momentum_buffer`, of its shape."""

        @torch.no_grad()
        def step(self, closure=None):
            """c = momentum b + (1 - momentum) g;  p = (1 - lr wd) p - lr sign(c);
            b = beta2 b + (1 - beta2) g, from b = 0."""
            loss = None if closure is None else torch.enable_grad()(closure)()
            for group in self.param_groups:
                lr, momentum = group["lr"], group["momentum"]
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buffer = state["momentum_buffer"]
                    direction = buffer.lerp(p.grad, 1 - momentum).sign_()
                    p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                    buffer.lerp_(p.grad, 1 - group["beta2"])
            return loss

    class Lion(HonoursFoundInf, PlainLion):
        pass

    return Lion


def make(
    groups: list[dict], *, lr: float, momentum: float, lion_beta2: float = 0.99
) -> "Optimizer":
    own = {"lr": lr, "momentum": momentum, "beta2": lion_beta2}
    return lion_class()(groups, own)


LION = OptimizerEntry(
    summary="the sign of momentum",
    make=make,
    lr=1e-4,
    weight_decay=0.5,
    momentum=0.9,
    nesterov=False,
    flags=LionFlags,
    ranges={
        "lr": (Range(1e-5, 2e-3, grid=(3e-5, 1e-4, 3e-4)),),
        "weight_decay": (Range(0.01, 5.0, grid=(0.1, 0.5, 2.0)),),
        "lion_beta2": (Range(0.9, 0.999, grid=(0.95, 0.99), scale="linear"),),
    },
)
