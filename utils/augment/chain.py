"""Several augmentations as one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChainPlan(NamedTuple):
    """The plan of each augmentation, in their order."""

    plans: tuple

    def slice(self, piece: slice) -> ChainPlan:
        return ChainPlan(tuple(plan.slice(piece) for plan in self.plans))


class Chain:
    """Applies one augmentation after the other.

    Args:
        first: gathers the pictures while it changes them (CropFlip).
        others: work in place on what the one before has made.
    """

    def __init__(self, first, *others):
        self.first, self.others = first, others

    def draw(self, n: int, generator: np.random.Generator) -> ChainPlan:
        """Choices for n samples. What comes later draws later: it changes nothing before it."""
        return ChainPlan(tuple(one.draw(n, generator) for one in (self.first, *self.others)))

    def apply(self, images, plan: ChainPlan, index: np.ndarray | None = None):
        """`images[index]`, augmented; arguments and result are those of `CropFlip.apply`."""
        first, *others = plan.plans
        pictures = self.first.apply(images, first, index)
        for augmentation, choices in zip(self.others, others, strict=True):
            pictures = augmentation.apply(pictures, choices)
        return pictures

    def pack(self, plan: ChainPlan, index: np.ndarray) -> np.ndarray:
        """(rows of all of them, n) int64: what each of them packs, in their order."""
        first, *others = plan.plans
        packed = [one.pack(choices) for one, choices in zip(self.others, others, strict=True)]
        return np.concatenate([self.first.pack(first, index), *packed])

    def carry_out(self, images, packed):
        """As `CropFlip.carry_out`, of packed choices."""
        first, *others = packed.split([one.packed_rows for one in (self.first, *self.others)])
        pictures = self.first.carry_out(images, first)
        for augmentation, choices in zip(self.others, others, strict=True):
            pictures = augmentation.carry_out(pictures, choices)
        return pictures
