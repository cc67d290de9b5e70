"""The outer optimizer of DiLoCo: steps along the difference that the workers' mean has made.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(2023), arXiv:2311.08105, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OuterOptimizer:
    """SGD with Nesterov momentum, once in a round, as in torch.optim.SGD:

        d = before - now                    the difference, in place of a gradient
        m = momentum * m + d
        before = before - lr * (d + momentum * m)

    `before` is where the round began, `now` the mean of the workers' parameters at its end. All
    workers make the same step, without communication. With lr 1 and momentum 0 the result is the
    mean, but for rounding.

    It is not to be combined with rounds that grow as the learning rate falls (qsr): the momentum
    would add differences of rounds of different lengths.

    Args:
        parameters: those that are averaged; equal on all workers now. Copied once, and once more
            for the momentum.
        lr, momentum: the paper's by default.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.7, momentum: float = 0.9):
        if not (lr > 0 and 0 <= momentum < 1):
            raise ValueError(f"lr is above 0, momentum in [0, 1); not {lr}, {momentum}")
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self.before = [p.detach().clone() for p in self.parameters]
        self.buffers = [torch.zeros_like(p) for p in self.before]

    @torch.no_grad()
    def step(self) -> None:
        """To be called when the parameters hold the mean; they then hold the result."""
        differences = torch._foreach_sub(self.before, [p.detach() for p in self.parameters])
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, differences)
        torch._foreach_add_(differences, self.buffers, alpha=self.momentum)
        torch._foreach_add_(self.before, differences, alpha=-self.lr)
        torch._foreach_copy_(self.parameters, self.before)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Of references, equal on all workers."""
        return {"before": list(self.before), "buffers": list(self.buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Raises ValueError if the state is of other parameters; nothing is changed then."""
        shapes = [p.shape for p in self.parameters]
        if any([t.shape for t in state[name]] != shapes for name in ("before", "buffers")):
            raise ValueError("the outer optimizer's state is of other parameters")
        torch._foreach_copy_(self.before, state["before"])
        torch._foreach_copy_(self.buffers, state["buffers"])
