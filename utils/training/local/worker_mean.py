"""Means over the workers of local steps, in the order of workers, so that they do not depend on
which process trains which worker. All is collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.local.workers import Workers


class WorkerMean:
    """Args:
    workers: how many there are, and which this process trains.
    exchange: with the other processes.

    What the methods take of a worker is given for each worker of this process: its tensors, by
    names that all workers have.
    """

    def __init__(self, workers: Workers, exchange: Exchange):
        self.workers, self.exchange = workers, exchange

    @torch.no_grad()
    def average_(self, own: Sequence[dict[str, Tensor]], names: Sequence[str]) -> list[Tensor]:
        """Overwrites the tensors of these names with their means over all workers. Needs memory for
        several copies of them while it works.

        Returns:
            for each worker of this process its squared distance from the mean, relative to the
            squared norm of the mean, () float64.
        """
        zero = own[0][names[0]].new_zeros((), dtype=torch.float64)
        distances, norm = [zero] * len(own), zero
        for alike in _by_dtype(own[0], names):
            rows = torch.stack([_flat(tensors, alike) for tensors in own])
            mean = self._of_rows(rows)
            for tensors in own:
                targets = [tensors[name] for name in alike]
                torch._foreach_copy_(targets, _divided(mean, targets))
            distances = [d + _square(row - mean) for d, row in zip(distances, rows, strict=True)]
            norm = norm + _square(mean)
        return [distance / norm for distance in distances]

    @torch.no_grad()
    def means(self, own: Sequence[dict[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
        """New tensors: the means over all workers."""
        found = {}
        for alike in _by_dtype(own[0], names):
            rows = torch.stack([_flat(tensors, alike) for tensors in own])
            like = [own[0][name] for name in alike]
            parts = _divided(self._of_rows(rows), like)
            for name, tensor, part in zip(alike, like, parts, strict=True):
                found[name] = torch.empty_like(tensor).copy_(part)
        return found

    def rows(self, own: Tensor) -> list[list[float]]:
        """The numbers of all workers, from those of this process's, (own, n). The host waits."""
        counts = self.workers.counts
        padded = own.new_zeros(max(counts), own.shape[1])
        padded[: len(own)] = own
        gathered = torch.stack(self.exchange.gather(padded)).tolist()
        return [row for count, part in zip(counts, gathered, strict=True) for row in part[:count]]

    def _of_rows(self, rows: Tensor) -> Tensor:
        """(own, n) -> (n,)."""
        return self.exchange.sum_rows(rows, self.workers.counts) / self.workers.size


def _by_dtype(tensors: dict[str, Tensor], names: Iterable[str]) -> Iterator[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name in names:
        groups.setdefault(tensors[name].dtype, []).append(name)
    return iter(groups.values())


def _flat(tensors: dict[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in names])


def _divided(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of `flat`, (n,), with the shapes of these tensors."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _square(values: Tensor) -> Tensor:
    """The squared norm of (n,), () float64."""
    return values.norm().double().square()
