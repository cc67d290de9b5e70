"""Parameters of which a step needs norms of the whole, as LAMB's and NovoGrad's."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.optim.multi_tensor import add_step
from utils.optim.parameters import Flags, Parameters


def count_step(group: dict, device: torch.device, flags: Flags) -> None:
    """Counts a step of the group on the device, unless the step is left out."""
    step = group.get("step", 0)
    if not isinstance(step, Tensor):  # none yet, or from a checkpoint
        step = torch.full((), float(step), device=device)
    group["step"] = step
    add_step(step, flags)


class WithNorms(Parameters):
    """Parameters of one group. Their steps lie in one flat tensor, sorted by size, so that one
    kernel scales all parameters of a size. Those that have the group's first gradient count its
    steps (`counts`).

    Args:
        exchange: with the other ranks, where parameters are sharded; norms are of whole parameters.
    """

    def __init__(self, group: dict, parameters: list[Tensor], exchange: Exchange):
        order = sorted(range(len(parameters)), key=lambda i: parameters[i].numel())
        super().__init__(group, [parameters[i] for i in order])
        self.exchange = exchange
        self.counts = parameters[0] is next(p for p in group["params"] if p.grad is not None)
        self.sizes = [
            (numel, len(list(same)))
            for numel, same in groupby(self.parameters, key=lambda p: p.numel())
        ]
        # Squared norms are summed over the ranks in the order of the group: by size each rank may
        # have another. Those of parameters that are not sharded count once, on rank 0.
        divided = [exchange.is_divided(p) for p in parameters]
        self.is_sharded = any(divided)
        counted = [one or exchange.rank == 0 for one in divided]
        self.counted = torch.tensor(counted, device=self.device)
        self.by_size = torch.tensor(order, device=self.device)
        self.by_group = self.by_size.argsort()

    def norms(self, *lists: list[Tensor]) -> tuple[Tensor, ...]:
        """The norm of each tensor, (n,) for each list; of whole parameters. Collective if any of
        them is sharded."""
        norms = [torch.stack(torch._foreach_norm(tensors)) for tensors in lists]
        if not self.is_sharded:
            return tuple(norms)
        squares = torch.stack(norms).square()[:, self.by_group]
        squares = self.exchange.sum(torch.where(self.counted, squares, 0.0))
        return squares.sqrt()[:, self.by_size].unbind()

    def scale_(self, flat: Tensor, scale: Tensor) -> None:
        """Multiplies each parameter's part of `flat` (see `flat_like`) by its `scale`, (n,)."""
        start = first = 0
        for numel, count in self.sizes:
            same = flat[start : start + numel * count].view(count, numel)
            same.mul_(scale[first : first + count, None])
            start, first = start + numel * count, first + count
