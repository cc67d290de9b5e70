"""What augmentations have in common, and several of them applied one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..to_device import to_device

if TYPE_CHECKING:  # worker processes import this file, and start fast without PyTorch
    from torch import Tensor


class Augmentation(ABC):
    """Draws for all samples of an epoch at once, so that the choices do not depend on how the epoch
    is divided, and changes any of its slices accordingly.

    A subclass defines `apply_to_array` for the host, and `pack` and `apply_packed` for a device,
    which a CUDA graph can record; or `apply` alone. Only the first of a chain is given an index.
    """

    packed_rows: ClassVar[int]  # rows of what `pack` returns
    reads_encoded: bool = False  # needs encoded pictures, of which it has windows decoded

    @abstractmethod
    def draw(self, n: int, generator: np.random.Generator) -> Any:
        """A plan for n samples: a NamedTuple of arrays (n, ...), or a tuple of plans."""

    def apply(self, images: Any, plan: Any, index: np.ndarray | None = None) -> Any:
        """`images[index]`, augmented according to `plan`: in host memory by NumPy, on other devices
        by PyTorch, with equal results.

        Args:
            images: (samples, height, width, channels) uint8, an array or a tensor.
            plan: for n samples.
            index: (n,) int64, which images; copies of them are changed. None: all, in order,
                perhaps IN PLACE.
        Returns:
            (n, height, width, channels) uint8: an array for an array, a tensor for a tensor.
        """
        if isinstance(images, np.ndarray):
            return self.apply_to_array(images, plan, index)
        if images.device.type != "cpu":
            return self.apply_packed(images, to_device(self.pack(plan, index), images.device))
        import torch

        return torch.from_numpy(self.apply_to_array(images.numpy(), plan, index))

    def apply_to_array(
        self, images: np.ndarray, plan: Any, index: np.ndarray | None = None
    ) -> np.ndarray:
        """`apply` in host memory."""
        raise NotImplementedError

    def pack(self, plan: Any, index: np.ndarray | None = None) -> np.ndarray:
        """(packed_rows, n) int64: index and plan in one array, to copy to a device at once."""
        raise NotImplementedError

    def apply_packed(self, images: Tensor, packed: Tensor) -> Tensor:
        """`apply` on a device, which alone is involved; `packed` is from `pack`."""
        raise NotImplementedError


def part_of(plan: Any, place: slice | np.ndarray) -> Any:
    """The plan for the samples at `place`; None of None."""
    if isinstance(plan, tuple):
        parts = [part_of(part, place) for part in plan]
        return type(plan)(*parts) if hasattr(plan, "_fields") else tuple(parts)
    return None if plan is None else plan[place]


def with_flips(plan: Any, flips: np.ndarray) -> Any:
    """The plan, or of a chain that of its first part, with these choices of mirroring: (n,) int64,
    1: mirrored."""
    if hasattr(plan, "_replace"):
        return plan._replace(flip=flips)
    return (with_flips(plan[0], flips), *plan[1:])


class Chain(Augmentation):
    """Several augmentations, whose plan is a tuple of theirs.

    Args:
        parts: the first is given the index, and gathers the images as it changes them; each of the
            others is given the result of the one before.
    """

    def __init__(self, *parts: Augmentation):
        self.parts = parts
        self.reads_encoded = parts[0].reads_encoded

    def draw(self, n: int, generator: np.random.Generator) -> tuple:
        """Each augmentation draws after those before it, so adding one at the end does not change
        their choices."""
        return tuple(part.draw(n, generator) for part in self.parts)

    def apply(self, images: Any, plan: tuple, index: np.ndarray | None = None) -> Any:
        for part, choices in zip(self.parts, plan, strict=True):
            images, index = part.apply(images, choices, index), None
        return images

    def pack(self, plan: tuple, index: np.ndarray | None = None) -> np.ndarray:
        packed = []
        for part, choices in zip(self.parts, plan, strict=True):
            packed.append(part.pack(choices, index))
            index = None
        return np.concatenate(packed)

    def apply_packed(self, images: Tensor, packed: Tensor) -> Tensor:
        rows = packed.split([part.packed_rows for part in self.parts])
        for part, choices in zip(self.parts, rows, strict=True):
            images = part.apply_packed(images, choices)
        return images
