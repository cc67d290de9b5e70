"""What a loader hands out."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One micro-batch on the device."""

    # (n, channels, height, width) float32, normalised; of texts PackedTokens (see utils/packed.py);
    # deferred ones: what `Loader.made` makes them of
    inputs: Tensor | tuple
    targets: Tensor  # (n,) int64
    step_samples: int  # samples in the whole optimizer step that this micro-batch belongs to
    ends_step: bool  # the last micro-batch of that step
    mixing: object | None = None  # what `Draws.plan` made for it; None: it is not mixed
    # Inputs and targets of samples apart from this step, where the mixing learns from such: with
    # the last micro-batch of a step, or with every one (see `Draws`).
    clean: tuple[Tensor | tuple, Tensor] | None = None
    filler: bool = False  # see Piece

    def tensors(self) -> Iterator[Tensor]:
        """All that lies on the device."""
        return _tensors(self)


def _tensors(part) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from _tensors(inner)
