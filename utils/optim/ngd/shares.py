"""Divides the updates of NGD's Fisher matrices among the ranks and distributes the results.

All ranks hold all matrices and the same gradients, so any rank can do any update. Each does its
part, and one collective on a flat tensor gives the results to all ranks, which then agree to the
bit. Every rank recomputes the multipliers itself: that takes 5 % of the time of an update, while
sending them would double the traffic.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...exchange import Exchange
from .batch import Batch
from .batched_fisher import FISHER, is_whole, renew_multipliers_

PIECES = 8  # axes are split so that each rank's part has about this many pieces, or more


def shares_of(batches: list[Batch], exchange: Exchange) -> list[Shares]:
    """One Shares for each set of batches that always update together; none for a single rank."""
    if exchange.size == 1:
        return []
    together: dict[tuple, list[Batch]] = {}
    for batch in batches:
        if batch.axes:
            together.setdefault(batch.together, []).append(batch)
    return [Shares(members, exchange) for members in together.values()]


class Shares:
    """The updates of some batches, divided among the ranks.

    Attributes:
        parts: for each axis, in the order of the batches, the slice of tensors for each rank.
        longest: number of elements that each rank sends: the largest part, to which others are
            padded.
    """

    def __init__(self, batches: list[Batch], exchange: Exchange):
        self.first, self.exchange = batches[0], exchange
        self.axes = [axis for batch in batches for axis in batch.axes]
        costs = [
            update_cost(axis.basis.shape[1], axis.basis.shape[2], batch.of_one.numel())
            for batch in batches
            for axis in batch.axes
        ]
        self.parts = divide(costs, [len(axis.rest) for axis in self.axes], exchange.size)
        for axis, parts in zip(self.axes, self.parts, strict=True):
            axis.own, axis.is_shared = parts[exchange.rank], True
        self._views = [self._views_of(rank) for rank in range(exchange.size)]
        self.longest = max(sum(view.numel() for view in views) for views in self._views)

    @property
    def updates_now(self) -> bool:
        return self.first.updates_now

    def exchange_(self) -> None:
        """Distributes the updated matrices to all ranks. Collective."""
        rank = self.exchange.rank
        sent = torch.zeros(self.longest, dtype=self.first.dtype, device=self.first.device)
        if self._views[rank]:
            torch._foreach_copy_(_split(sent, self._views[rank]), self._views[rank])
        for other, received in enumerate(self.exchange.gather(sent)):
            if other != rank and self._views[other]:
                torch._foreach_copy_(self._views[other], _split(received, self._views[other]))
        renew_multipliers_(self.axes)

    def _views_of(self, rank: int) -> list[Tensor]:
        """Views of the matrices that `rank` updates."""
        return [
            getattr(axis, name)[parts[rank]]
            for axis, parts in zip(self.axes, self.parts, strict=True)
            if parts[rank].start < parts[rank].stop
            for name in FISHER
        ]


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Consecutive views of `flat`, in the shapes of `like`."""
    sizes = [tensor.numel() for tensor in like]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def update_cost(fisher_rank: int, length: int, elements: int) -> float:
    """Estimated cost of updating an axis's Fisher matrix from a gradient of `elements` elements.

    The unit is one multiplication in the product of the gradient with a matrix. Multiplications of
    smaller matrices take longer: the coefficients are fitted to times of ResNet-50's axes on a CPU
    core.
    """
    width = length if is_whole(fisher_rank, length) else fisher_rank
    return elements * (width + 24.0) + 20.0 * fisher_rank**2 * length + 360.0 * fisher_rank**3


def divide(costs: list[float], counts: list[int], size: int) -> list[list[slice]]:
    """For each axis, the slice of its tensors for each of `size` ranks. Axis i has counts[i]
    tensors, which cost costs[i] each.

    Greedy: axes are cut into pieces, and each piece, the most expensive first, goes to the rank
    with the smallest load. Deterministic, so that all ranks agree.
    """
    mean_load = sum(cost * count for cost, count in zip(costs, counts, strict=True)) / size
    pieces = []  # (cost, axis, number of tensors)
    for axis, (cost, count) in enumerate(zip(costs, counts, strict=True)):
        limit = max(1, int(mean_load / PIECES / cost))  # tensors of a piece
        full, rest = divmod(count, limit)
        numbers = [limit] * full + [rest] * (rest > 0)
        pieces += [(cost * number, axis, number) for number in numbers]
    loads, assigned = [0.0] * size, [[0] * size for _ in costs]
    for cost, axis, number in sorted(pieces, key=lambda piece: -piece[0]):
        rank = loads.index(min(loads))
        loads[rank] += cost
        assigned[axis][rank] += number
    parts = []
    for numbers in assigned:
        ends = list(itertools.accumulate(numbers))
        parts.append([slice(end - n, end) for end, n in zip(ends, numbers, strict=True)])
    return parts
