"""What is random in a batch: drawn on the host, from a generator of its own for every position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# One stream of random numbers each, so that none depends on how much another one draws.
ORDER_STREAM, AUGMENT_STREAM, MIX_STREAM = 0, 1, 2
TRIAL_DRAWS = 32  # some of them mix, however rarely that is


def random_generator(seed: int, stream: int, *position: int) -> np.random.Generator:
    """A generator that depends on its arguments alone: non-negative integers."""
    return np.random.default_rng([seed, stream, *position])


class Draws(Protocol):
    """What was drawn for the samples of a step (see utils/mixup/mixing.py)."""

    clean: int  # samples of the clean batch that goes with the step; 0: none
    clean_each: bool  # with every micro-batch, not with the last one alone

    def slice(self, piece: slice) -> Draws: ...  # of a micro-batch, from the step's first sample on

    def filler(self, n: int) -> Draws: ...  # of n samples that do not count

    def plan(self, targets: Tensor): ...  # on the device


class Mixing(Protocol):
    """Draws for an optimizer step how its samples are mixed (see utils/mixup/mixing.py)."""

    block: int  # samples that are mixed with each other

    def draw(
        self, n: int, epoch: int, step: int, generator: np.random.Generator
    ) -> Draws | None: ...

    def check(self, samples: int, step_size: int) -> None: ...


def trial_draws(mixing: Mixing | None, n: int) -> Draws | None:
    """For a step of n samples, by which memory is measured: the first draws that mix, and by what
    is learned where anything is, which needs the most."""
    drawn = None
    for seed in range(TRIAL_DRAWS if mixing is not None else 0):
        found = mixing.draw(n, 0, 0, np.random.default_rng(seed))
        drawn = drawn or found
        if found is not None and found.clean:
            return found
    return drawn
