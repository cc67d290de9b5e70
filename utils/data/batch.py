"""What a loader hands out, and what it is drawn from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mixup.mixing import Draws, Mixing

# Separate streams of random numbers, so that none depends on how much another draws.
ORDER_STREAM, AUGMENT_STREAM, MIX_STREAM, FLIP_STREAM = range(4)
TRIAL_DRAWS = 32  # enough for some that mix, even if mixing is rare


def random_generator(seed: int, stream: int, *position: int) -> np.random.Generator:
    """A generator that depends on its arguments alone: non-negative integers."""
    return np.random.default_rng([seed, stream, *position])


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


class Batch(NamedTuple):
    """One micro-batch on the device."""

    # (n, channels, height, width) float32, normalised; for texts PackedTokens (utils/packed.py); if
    # deferred, what `Loader.made` makes the inputs from
    inputs: Tensor | tuple
    targets: Tensor  # (n,) int64
    step_samples: int  # samples in the whole optimizer step, of all ranks
    ends_step: bool  # the last micro-batch of that step in this process
    mix_plan: Any = None  # from `Draws.plan`; None: it is not mixed
    # Inputs and targets of samples outside this step, for mixing that learns: in the last
    # micro-batch of a step, or in every one (see `Draws`).
    clean: tuple[Tensor | tuple, Tensor] | None = None
    filler: bool = False  # see Piece
    worker: int = 0  # its place among those of this process; see training/local/steps.py

    def tensors(self) -> Iterator[Tensor]:
        """All tensors on the device."""
        return _tensors(self)


def _tensors(part) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from _tensors(inner)


def one_ahead(makers: Iterable[Callable[[], Batch]], device: torch.device) -> Generator[Batch]:
    """Makes each batch on a side stream while the previous one is in use."""
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the resident images were copied there
    ahead = None
    for make in chain(makers, [None]):
        ready = ahead
        if make is not None:
            with torch.cuda.stream(side):
                ahead = make(), side.record_event()
        if ready is not None:
            batch, made = ready
            training = torch.cuda.current_stream(device)
            training.wait_event(made)  # the device waits, the host does not
            for tensor in batch.tensors():
                tensor.record_stream(training)
            yield batch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for all epochs: the allocator reuses memory within a stream only."""
    return torch.cuda.Stream(device)
