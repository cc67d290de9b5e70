"""Random draws for batches: made on the host, from a separate generator for every position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Separate streams of random numbers, so that none depends on how much another draws.
ORDER_STREAM, AUGMENT_STREAM, MIX_STREAM = 0, 1, 2
TRIAL_DRAWS = 32  # enough for some that mix, even if mixing is rare


def random_generator(seed: int, stream: int, *position: int) -> np.random.Generator:
    """A generator that depends on its arguments alone: non-negative integers."""
    return np.random.default_rng([seed, stream, *position])


class Draws(Protocol):
    """The random numbers for the samples of a step (see utils/mixup/mixing.py)."""

    clean_samples: int  # of the step's clean batch; 0: there is none
    clean_per_micro_batch: bool  # every micro-batch has a clean batch, not only the last one

    def slice(self, piece: slice) -> Draws: ...  # for a micro-batch at this place in the step

    def filler(self, n: int) -> Draws: ...  # for n samples that do not count

    def plan(self, targets: Tensor): ...  # on the device


class Mixing(Protocol):
    """Draws for an optimizer step how its samples are mixed (see utils/mixup/mixing.py)."""

    block: int  # samples that are mixed with each other

    def with_block(self, block: int) -> Mixing: ...  # the same with blocks of another size

    def draw(
        self, n: int, epoch: int, step: int, generator: np.random.Generator
    ) -> Draws | None: ...

    def check(self, samples: int, step_size: int) -> None: ...


def trial_draws(mixing: Mixing | None, n: int) -> Draws | None:
    """Draws for a step of n samples that measures memory: the first that mix samples; if mixing is
    learned, the first that also learn, which need the most."""
    drawn = None
    for seed in range(TRIAL_DRAWS if mixing is not None else 0):
        found = mixing.draw(n, 0, 0, np.random.default_rng(seed))
        drawn = drawn or found
        if found is not None and found.clean_samples:
            return found
    return drawn
