"""Which rank updates which Fisher matrices of NGD, and how the others come to know of it.

All ranks have all matrices and see the same gradients, so that any of them can make any update.
Each makes those of its share, and one collective with one flat tensor brings the results to all
ranks, which have the same bits from then on. What gradients are multiplied by is made from them
by every rank: that takes 5 % of the time of an update, and would be half of what is sent.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.optim.ngd.batch import Batch
from utils.optim.ngd.batched_fisher import FISHER, is_whole, renew_multipliers_

PIECES = 8  # of which a rank's share is made, or more: what is larger than one is cut


def shares_of(batches: list[Batch], exchange: Exchange) -> list[Shares]:
    """One for the batches that always update together; none where there are no other ranks."""
    if exchange.size == 1:
        return []
    together: dict[tuple, list[Batch]] = {}
    for batch in batches:
        if batch.axes and batch.group["foreach"]:
            timing = batch.group["update_period"], batch.step
            together.setdefault((batch.device, batch.dtype, *timing), []).append(batch)
    return [Shares(members, exchange) for members in together.values()]


class Shares:
    """The updates of these batches, divided among the ranks.

    Attributes:
        parts: of each axis, in the order of the batches, the tensors that each rank updates.
        longest: number of elements of the tensor that each rank sends.
    """

    def __init__(self, batches: list[Batch], exchange: Exchange):
        self.first, self.exchange = batches[0], exchange
        self.axes = [axis for batch in batches for axis in batch.axes]
        costs = [
            update_cost(*axis.basis.shape[1:], batch.of_one.numel())
            for batch in batches
            for axis in batch.axes
        ]
        self.parts = divide(costs, [len(axis.rest) for axis in self.axes], exchange.size)
        for axis, parts in zip(self.axes, self.parts, strict=True):
            axis.own, axis.is_shared = parts[exchange.rank], True
        self._views = [self._of(rank) for rank in range(exchange.size)]
        self.longest = max(sum(view.numel() for view in views) for views in self._views)

    @property
    def updates_now(self) -> bool:
        return self.first.updates_now

    def exchange_(self) -> None:
        """All ranks get the matrices of all, after each has updated its own."""
        rank = self.exchange.rank
        sent = torch.zeros(self.longest, dtype=self.first.dtype, device=self.first.device)
        if self._views[rank]:
            torch._foreach_copy_(_laid_out(sent, self._views[rank]), self._views[rank])
        for other, received in enumerate(self.exchange.gather(sent)):
            if other != rank and self._views[other]:
                torch._foreach_copy_(self._views[other], _laid_out(received, self._views[other]))
        renew_multipliers_(self.axes)

    def _of(self, rank: int) -> list[Tensor]:
        """Views of what `rank` updates."""
        return [
            getattr(axis, name)[parts[rank]]
            for axis, parts in zip(self.axes, self.parts, strict=True)
            if parts[rank].start < parts[rank].stop
            for name in FISHER
        ]


def _laid_out(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat` of these shapes, one after the other."""
    sizes = [tensor.numel() for tensor in like]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def update_cost(rank: int, length: int, elements: int) -> float:
    """What it costs to update the Fisher matrix of an axis, from a gradient of so many elements.

    In multiplications of a product with the gradient, which notes the scatter. Others take longer,
    the smaller the matrices: the weights are fitted to times of ResNet-50's axes on a CPU core.
    """
    width = length if is_whole(rank, length) else rank
    return elements * (width + 24.0) + 20.0 * rank**2 * length + 360.0 * rank**3


def divide(costs: list[float], counts: list[int], size: int) -> list[list[slice]]:
    """The tensors of each of `size` ranks, for each axis, of counts[i] tensors at costs[i] each.

    Greedy: pieces of axes, the most expensive first, go to the rank that has the least to do.
    Deterministic, so that all ranks find the same.
    """
    share = sum(cost * count for cost, count in zip(costs, counts, strict=True)) / size
    pieces = []  # (cost, axis, number of tensors)
    for axis, (cost, count) in enumerate(zip(costs, counts, strict=True)):
        most = max(1, int(share / PIECES / cost))
        whole, left = divmod(count, most)
        numbers = [most] * whole + [left] * (left > 0)
        pieces += [(cost * number, axis, number) for number in numbers]
    loads, held = [0.0] * size, [[0] * size for _ in costs]
    for cost, axis, number in sorted(pieces, key=lambda piece: -piece[0]):
        rank = loads.index(min(loads))
        loads[rank] += cost
        held[axis][rank] += number
    parts = []
    for numbers in held:
        ends = list(itertools.accumulate(numbers))
        parts.append([slice(end - n, end) for end, n in zip(ends, numbers, strict=True)])
    return parts
