"""Joins the tensors of many axes into few batches, since many small operations are slow."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

# Matrices (r, r) of different r are padded with zeros to be one batch where that adds at most this
# part to the multiplications of all. On a GPU launches of kernels count; on a CPU multiplications.
MOST_PADDING = {"cuda": 1 / 8, "cpu": 0.0}


class Layout:
    """Which tensors are joined: matrices (r, D) of the same shape; matrices (r, r) of the same
    size, to which they may be padded with zeros; and numbers, one for each matrix, of all axes.

    Attributes:
        counts: number of matrices of each axis, in order of (r, D).
        shapes: the different (r, D), in order. counts_of_shapes: the number of matrices of each.
        sizes: to which matrices (r, r) of each shape are padded.
    """

    def __init__(self, shapes: list[tuple[int, int]], counts: list[int], device: torch.device):
        """shapes, counts: (r, D) and number of matrices of each axis, in order of (r, D)."""
        self.counts, self.shapes = counts, sorted(set(shapes))
        ends = list(itertools.accumulate(shapes.count(shape) for shape in self.shapes))
        self._axes = [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
        self.counts_of_shapes = [sum(counts[part]) for part in self._axes]
        ranks = [fisher_rank for fisher_rank, _ in self.shapes]
        self.sizes = padded_sizes(ranks, self.counts_of_shapes, MOST_PADDING.get(device.type, 0.0))

    def to_shapes(self, of_axes: list[Tensor]) -> list[Tensor]:
        """A tensor for each axis -> one for each shape."""
        return [joined(of_axes[part]) for part in self._axes]

    def to_axes(self, of_shapes: list[Tensor]) -> list[Tensor]:
        """The inverse of `to_shapes`."""
        pairs = zip(of_shapes, self._axes, strict=True)
        return [each for batch, part in pairs for each in batch.split(self.counts[part])]

    def to_sizes(self, of_shapes: list[Tensor]) -> list[Tensor]:
        """Matrices (B, r, r) for each shape -> (B', s, s) for each size, padded with zeros."""
        batches: dict[int, list[Tensor]] = {size: [] for size in self.sizes}
        for matrices, size in zip(of_shapes, self.sizes, strict=True):
            more = size - matrices.shape[-1]
            batches[size].append(pad(matrices, (0, more, 0, more)) if more else matrices)
        return [joined(members) for members in batches.values()]

    def cut(self, of_sizes: list[Tensor]) -> list[Tensor]:
        """The inverse of `to_sizes`: views (B, r, r) of (B', s, s), without the padding."""
        parts = [
            part
            for batch, size in zip(of_sizes, dict.fromkeys(self.sizes), strict=True)
            for part in batch.split(self._counts_of(size))
        ]
        return [
            part if part.shape[-1] == r else part[:, :r, :r]
            for part, (r, _) in zip(parts, self.shapes, strict=True)
        ]

    def for_shapes(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """(B,) -> (B', 1, 1) for each shape."""
        return numbers[:, None, None].split(self.counts_of_shapes)

    def for_sizes(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """(B,) -> (B', 1, 1) for each size."""
        counts = [sum(self._counts_of(size)) for size in dict.fromkeys(self.sizes)]
        return numbers[:, None, None].split(counts)

    def times(self, numbers: Tensor, factors: list[float]) -> Tensor:
        """(B,), each multiplied by the factor of its shape."""
        numbers = numbers.clone()
        torch._foreach_mul_(numbers.split(self.counts_of_shapes), factors)
        return numbers

    def _counts_of(self, size: int) -> list[int]:
        """Number of matrices of each shape of this size."""
        pairs = zip(self.counts_of_shapes, self.sizes, strict=True)
        return [count for count, own in pairs if own == size]


def padded_sizes(ranks: list[int], counts: list[int], most: float) -> list[int]:
    """The size to which matrices (r, r) are padded, for each r in ascending order.

    Greedy: from the smallest size on, all of a size go to the next larger one where all this adds
    at most the part `most` to the r^3 of all matrices.
    """
    sizes = list(ranks)
    left = most * sum(count * r**3 for r, count in zip(ranks, counts, strict=True))
    for size, larger in itertools.pairwise(sorted(set(ranks))):
        members = [i for i, own in enumerate(sizes) if own == size]
        added = sum(counts[i] for i in members) * (larger**3 - size**3)
        if added <= left:
            left -= added
            for i in members:
                sizes[i] = larger
    return sizes


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
