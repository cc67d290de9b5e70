"""Random resized crop and horizontal flip of encoded pictures, carried out by their decoder.

A window covers a random part of the picture's area, at a random aspect ratio and place, and is
resized to the size of the batch: Szegedy et al., "Going deeper with convolutions" (2015). Areas,
ratios and places are distributed as in torchvision's RandomResizedCrop, which draws area and ratio
until the window fits into the picture. Here the ratio is drawn from its distribution among windows
that fit, so that every sample takes equally many random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

RATIO = 3 / 4, 4 / 3  # width / height
STEPS = 50  # of bisection: halves the interval of logarithms of RATIO to less than a rounding error


class ResizedCropPlan(NamedTuple):
    """The choices for n samples, each of shape (n,); all but `flip` are uniform in [0, 1)."""

    ratio: np.ndarray
    area: np.ndarray
    top: np.ndarray
    left: np.ndarray
    flip: np.ndarray  # int64; 1: mirror left to right

    def slice(self, piece: slice) -> ResizedCropPlan:
        return ResizedCropPlan(*(choice[piece] for choice in self))


@dataclass(frozen=True)
class ResizedCrop:
    """Crop a window of at least `area` of the picture, mirror with probability `flip`.

    Args:
        area: least area of a window, as a fraction of the picture's, in (0, 1].
        flip: probability of mirroring, 0 to 1.
    """

    area: float = 0.08
    flip: float = 0.5
    reads_encoded: ClassVar[bool] = True

    def draw(self, n: int, generator: np.random.Generator) -> ResizedCropPlan:
        """A plan for n samples; uses the same number of random numbers for every sample."""
        ratio, area, top, left, flip = generator.random((5, n))
        return ResizedCropPlan(ratio, area, top, left, (flip < self.flip).astype(np.int64))

    def apply(self, pictures, plan: ResizedCropPlan, index: np.ndarray) -> np.ndarray:
        """The pictures `index` (n,), cropped, resized and mirrored according to `plan`.

        Args:
            pictures: has `sizes(index)` and `decode(index, windows, flips)`, as EncodedPictures.
        Returns:
            (n, height, width, channels) uint8.
        """
        return pictures.decode(index, self.windows(plan, pictures.sizes(index)), plan.flip)

    def windows(self, plan: ResizedCropPlan, sizes: np.ndarray) -> np.ndarray:
        """(n, 4) int64: top, left, height and width of the windows, in pixels.

        Args:
            sizes: (n, 2) height and width of the pictures.
        """
        height, width = sizes.T.astype(np.float64)
        ratio = np.exp(self._log_ratio(plan.ratio, np.log(width / height)))
        # A window of area a and ratio r is sqrt(a H W r) wide and sqrt(a H W / r) high.
        most = np.minimum(1, np.minimum(width / height / ratio, height / width * ratio))
        area = self.area + (most - self.area) * plan.area
        # If no window of that area fits, the largest one of the ratio is taken.
        area = np.where(most < self.area, most, area) * height * width
        window_height = np.clip(np.rint(np.sqrt(area / ratio)), 1, height)
        window_width = np.clip(np.rint(np.sqrt(area * ratio)), 1, width)
        top = np.floor(plan.top * (height - window_height + 1))
        left = np.floor(plan.left * (width - window_width + 1))
        return np.stack([top, left, window_height, window_width], 1).astype(np.int64)

    def _log_ratio(self, uniform: np.ndarray, log_aspect: np.ndarray) -> np.ndarray:
        """Logarithms of the windows' ratios, (n,), from uniform random numbers.

        A window with log ratio x fits if its area is at most exp(-|x - c|), with c the picture's
        own log ratio. So the density of x is proportional to exp(-|x - c|) - s, with s the least
        area, where that is positive. Its integral from c to c + d is 1 - exp(-d) - s d.
        """
        low, high = np.log(RATIO)
        reach = -np.log(self.area)  # beyond it no window fits
        start = np.clip(log_aspect - reach, low, high)
        end = np.clip(log_aspect + reach, low, high)

        def mass(x: np.ndarray) -> np.ndarray:
            """The integral from c to x."""
            distance = np.abs(x - log_aspect)
            return np.sign(x - log_aspect) * (-np.expm1(-distance) - self.area * distance)

        wanted = mass(start) + uniform * (mass(end) - mass(start))
        for _ in range(STEPS):
            middle = (start + end) / 2
            below = mass(middle) < wanted
            start, end = np.where(below, middle, start), np.where(below, end, middle)
        return (start + end) / 2
