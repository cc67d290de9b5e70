"""What a loader hands out."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor


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
