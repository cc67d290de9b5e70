"""Training samples that are not trained on for part of the run."""

import numpy as np


class HoldOut:
    """Samples that are held out during the first epochs; without `release_from`, during all.

    In each of these epochs every held-out sample is replaced by another one, drawn at random, which
    the epoch then visits twice. So all epochs have equally many samples and steps.

    Args:
        index: (n,) int64: the held-out samples.
        total: number of all samples.
    """

    def __init__(self, index: np.ndarray, total: int):
        self._is_held_out = np.zeros(total, bool)
        self._is_held_out[index] = True
        self._others = np.flatnonzero(~self._is_held_out)
        self._until: int | None = None

    def release_from(self, epoch: int) -> None:
        """The held-out samples are trained on from this epoch on."""
        self._until = epoch

    def replace(self, order: np.ndarray, epoch: int, generator: np.random.Generator) -> np.ndarray:
        """The order of an epoch, (samples,) int64, with each held-out sample replaced."""
        if self._until is not None and epoch >= self._until:
            return order
        held_out = self._is_held_out[order]
        substitutes = generator.choice(self._others, held_out.sum(), replace=False)
        order = order.copy()
        order[held_out] = substitutes
        return order
