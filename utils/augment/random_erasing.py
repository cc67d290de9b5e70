"""Random erasing: fills one rectangle of an image with a colour.

Zhong et al., "Random erasing data augmentation", AAAI 2020, algorithm 1, with the paper's range of
areas. The aspect ratio is log-uniform, so that flat and tall rectangles are equally likely. A
rectangle larger than the image is clipped to it, where the paper draws again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .chain import Augmentation

if TYPE_CHECKING:
    from torch import Tensor

AREA = (0.02, 0.33)  # fraction of the image
ASPECT = (0.3, 3.3)  # height / width


class ErasingPlan(NamedTuple):
    """The rectangle of each of n samples in pixels; every array has shape (n,), dtype int64."""

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray  # 0: nothing is erased
    width: np.ndarray


class RandomErasing(Augmentation):
    """Fills a rectangle with one colour, IN PLACE.

    Args:
        height, width: size of the images in pixels.
        probability: that an image is changed, 0 to 1.
        colour: value per channel, 0 to 255 (`value` in torchvision). With the data set's mean
            colour the rectangle is about 0 after normalisation, as with torchvision's default.
    """

    packed_rows = 4

    def __init__(self, height: int, width: int, probability: float, colour: Sequence[int]):
        assert 0 <= probability <= 1 and all(0 <= value <= 255 for value in colour)
        self.height, self.width, self.probability = height, width, probability
        self.colour = np.asarray(colour, np.uint8)  # (channels,)

    def draw(self, n: int, generator: np.random.Generator) -> ErasingPlan:
        """A plan for n samples; uses the same number of random numbers for every sample."""
        erased, area, aspect, top, left = generator.random((5, n))
        area = (AREA[0] + (AREA[1] - AREA[0]) * area) * self.height * self.width  # square pixels
        low, high = map(math.log, ASPECT)
        aspect = np.exp(low + (high - low) * aspect)
        height = np.clip(np.rint(np.sqrt(area * aspect)), 1, self.height).astype(np.int64)
        width = np.clip(np.rint(np.sqrt(area / aspect)), 1, self.width).astype(np.int64)
        erased = erased < self.probability
        return ErasingPlan(
            top=(top * (self.height - height + 1)).astype(np.int64),
            left=(left * (self.width - width + 1)).astype(np.int64),
            height=np.where(erased, height, 0),
            width=np.where(erased, width, 0),
        )

    def apply_to_array(
        self, images: np.ndarray, plan: ErasingPlan, index: np.ndarray | None = None
    ) -> np.ndarray:
        assert index is None  # it follows one that gathers
        if not len(images):  # a filler
            return images
        channels = images.shape[3]
        rows = images.reshape(*images.shape[:2], -1)  # (n, height, width * channels)
        assert np.shares_memory(rows, images)
        colour = np.tile(self.colour, self.width)  # (width * channels,): fills a row in one copy
        changed = np.flatnonzero(plan.height)
        rectangles = np.stack([changed, *(choice[changed] for choice in plan)], 1).tolist()
        for sample, top, left, height, width in rectangles:  # a microsecond each
            rows[sample, top : top + height, channels * left : channels * (left + width)] = colour[
                : channels * width
            ]
        return images

    def pack(self, plan: ErasingPlan, index: np.ndarray | None = None) -> np.ndarray:
        assert index is None  # it follows one that gathers
        return np.stack([*plan])

    def apply_packed(self, images: Tensor, packed: Tensor) -> Tensor:
        """By masks, IN PLACE."""
        import torch

        top, left, height, width = packed[:, :, None]  # (n, 1) each
        rows = torch.arange(images.shape[1], device=images.device)
        columns = torch.arange(images.shape[2], device=images.device)
        inside = ((rows >= top) & (rows < top + height))[:, :, None] & (
            (columns >= left) & (columns < left + width)
        )[:, None, :]
        for channel, value in enumerate(self.colour.tolist()):
            images[..., channel].masked_fill_(inside, value)
        return images
