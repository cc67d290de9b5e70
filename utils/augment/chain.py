"""Several augmentations, applied one after the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChainPlan(NamedTuple):
    """One plan per augmentation, in order."""

    plans: tuple

    def slice(self, piece: slice) -> ChainPlan:
        return ChainPlan(tuple(plan.slice(piece) for plan in self.plans))


class Chain:
    """An augmentation that applies several.

    Args:
        first: gathers the images as it transforms them (CropFlip, ResizedCrop).
        others: change the previous one's result, in place or not.
    """

    def __init__(self, first, *others):
        self.first, self.others = first, others
        self.reads_encoded = first.reads_encoded

    def draw(self, n: int, generator: np.random.Generator) -> ChainPlan:
        """A plan for n samples. Each augmentation draws after those before it, so adding one at the
        end does not change their choices."""
        return ChainPlan(tuple(one.draw(n, generator) for one in (self.first, *self.others)))

    def apply(self, images, plan: ChainPlan, index: np.ndarray | None = None):
        """`images[index]`, augmented; arguments and result are those of `CropFlip.apply`."""
        first, *others = plan.plans
        result = self.first.apply(images, first, index)
        for augmentation, choices in zip(self.others, others, strict=True):
            result = augmentation.apply(result, choices)
        return result

    def pack(self, plan: ChainPlan, index: np.ndarray) -> np.ndarray:
        """(sum of packed_rows, n) int64: the packed plans of all augmentations, in order."""
        first, *others = plan.plans
        packed = [one.pack(choices) for one, choices in zip(self.others, others, strict=True)]
        return np.concatenate([self.first.pack(first, index), *packed])

    def apply_packed(self, images, packed):
        """Like `CropFlip.apply_packed`, for a packed plan."""
        first, *others = packed.split([one.packed_rows for one in (self.first, *self.others)])
        result = self.first.apply_packed(images, first)
        for augmentation, choices in zip(self.others, others, strict=True):
            result = augmentation.apply_packed(result, choices)
        return result


class Later:
    """Several augmentations of pictures that are on the device already.

    Args:
        parts: each is given the result of the one before.
    """

    def __init__(self, *parts):
        self.parts = parts

    def draw(self, n: int, generator: np.random.Generator) -> ChainPlan:
        """A plan for n samples, drawn as by Chain."""
        return ChainPlan(tuple(part.draw(n, generator) for part in self.parts))

    def apply(self, images, plan: ChainPlan):
        """(n, height, width, channels) uint8, from likewise; may change `images`."""
        for part, choices in zip(self.parts, plan.plans, strict=True):
            images = part.apply(images, choices)
        return images
