"""Training samples that are not trained on for a part of the run."""

import numpy as np


class HoldOut:
    """Samples that are held out of the first epochs.

    In each of these epochs every held-out sample is replaced by another one, so that the epoch has
    as many samples and steps as ever.

    Args:
        index: (held out,) int64.
        total: number of all samples.
    """

    def __init__(self, index: np.ndarray, total: int):
        self._is_held_out = np.zeros(total, bool)
        self._is_held_out[index] = True
        self._others = np.flatnonzero(~self._is_held_out)
        self._until: int | None = None

    def join_from(self, epoch: int | None) -> None:
        """Trains on all samples from this epoch on; None: never."""
        self._until = epoch

    def replace(self, order: np.ndarray, epoch: int, generator: np.random.Generator) -> np.ndarray:
        """The order of an epoch, (samples,) int64, without the samples held out of it."""
        if self._until is not None and epoch >= self._until:
            return order
        held_out = self._is_held_out[order]
        substitutes = generator.choice(self._others, held_out.sum(), replace=False)
        order = order.copy()
        order[held_out] = substitutes
        return order
