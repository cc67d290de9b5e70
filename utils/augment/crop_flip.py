"""Random crop with padding, horizontal flip and cutout, for a whole batch of uint8 images.

Two steps, kept apart so that the choices do not depend on how a batch is divided: `draw` chooses
for every sample of the whole optimizer step, `apply` carries the choices out for any slice of it,
on the device that holds the images. Crop and flip: He et al., "Deep residual learning" (2016),
section 4.2. Cutout: DeVries and Taylor (2017).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError


class CropFlipPlan(NamedTuple):
    """What happens to each of n samples; every array has shape (n,) and dtype int64."""

    top: np.ndarray  # first row of the crop in the padded image, 0 .. 2 * padding
    left: np.ndarray  # first column of it
    flip: np.ndarray  # 1: mirrored left to right
    hole_y: np.ndarray  # row of the centre of the hole that cutout leaves
    hole_x: np.ndarray  # column of it

    def slice(self, start: int, stop: int) -> "CropFlipPlan":
        return CropFlipPlan(*(choice[start:stop] for choice in self))


@dataclass(frozen=True)
class CropFlip:
    """Shift by up to `padding` pixels, mirror with probability `flip`, blank a square.

    Args:
        height, width: size of the images in pixels; it stays the same.
        padding: pixels added on every side before the crop; 0 leaves the crop out.
        mode: what the border is filled with: "zeros" (black) or "reflect" (the image's mirror).
        flip: probability of the mirror image, 0 to 1.
        cutout: side in pixels of the blank square, 0 for none; it may stick out of the image.
    """

    height: int
    width: int
    padding: int = 4
    mode: str = "zeros"
    flip: float = 0.5
    cutout: int = 0

    def __post_init__(self):
        if self.mode not in ("zeros", "reflect"):
            raise ValueError(f"mode is 'zeros' or 'reflect', not {self.mode!r}")
        if self.padding >= min(self.height, self.width):
            raise UserError(
                f"padding {self.padding} is not smaller than the image "
                f"({self.height}x{self.width}): choose a smaller --crop_padding"
            )

    def draw(self, n: int, generator: np.random.Generator) -> CropFlipPlan:
        """Choices for n samples. What is off is drawn too, so that the others stay the same."""
        return CropFlipPlan(
            top=generator.integers(0, 2 * self.padding + 1, n),
            left=generator.integers(0, 2 * self.padding + 1, n),
            flip=(generator.random(n) < self.flip).astype(np.int64),
            hole_y=generator.integers(0, self.height, n),
            hole_x=generator.integers(0, self.width, n),
        )

    def apply(self, images: Tensor, plan: CropFlipPlan) -> Tensor:
        """(n, height, width, channels) uint8 -> the same, on the same device.

        On a CPU by memory copies of whole rows, elsewhere by one gather: equal to the bit. May
        overwrite `images`.
        """
        if images.device.type == "cpu":
            return self.apply_rows(images, plan)
        return self.apply_gather(images, plan)

    def apply_gather(self, images: Tensor, plan: CropFlipPlan) -> Tensor:
        """The definition: the source row and column of each target pixel, then one gather."""
        n, height, width, _ = images.shape
        packed = torch.from_numpy(np.stack(plan))
        if images.device.type == "cuda":
            packed = packed.pin_memory().to(images.device, non_blocking=True)
        top, left, flip, hole_y, hole_x = packed
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        mirrored = torch.where(flip[:, None] == 1, width - 1 - columns, columns)
        y = rows + top[:, None] - self.padding  # (n, height), from -padding to height + padding
        x = mirrored + left[:, None] - self.padding  # (n, width)
        blank = torch.zeros(n, height, width, dtype=torch.bool, device=images.device)
        if self.mode == "zeros":
            blank |= ((y < 0) | (y >= height))[:, :, None] | ((x < 0) | (x >= width))[:, None, :]
        if self.cutout:
            blank |= (
                self._in_hole(rows, hole_y[:, None])[:, :, None]
                & self._in_hole(columns, hole_x[:, None])[:, None, :]
            )
        y, x = _mirror(y, height), _mirror(x, width)
        sample = torch.arange(n, device=images.device)
        picked = images[sample[:, None, None], y[:, :, None], x[:, None, :]]
        return picked.masked_fill_(blank[..., None], 0)

    def apply_rows(self, images: Tensor, plan: CropFlipPlan) -> Tensor:
        """The same on a CPU: NumPy moves each row as one piece of memory."""
        n, height, width, channels = images.shape
        p = self.padding
        pixels = images.contiguous().numpy()
        if p:
            pad = [(0, 0), (p, p), (p, p), (0, 0)]
            padded = np.pad(pixels, pad, "constant" if self.mode == "zeros" else "reflect")
            windows = np.lib.stride_tricks.as_strided(  # every crop of every padded image
                padded,
                (n, 2 * p + 1, 2 * p + 1, height, width * channels),
                (*padded.strides[:3], padded.strides[1], 1),
                writeable=False,
            )
            pixels = windows[np.arange(n), plan.top, plan.left]
            pixels = pixels.reshape(n, height, width, channels)
        mirrored = np.flatnonzero(plan.flip)
        if len(mirrored):
            # torch.flip is vectorised for interleaved channels, NumPy's reversal is not.
            planes = torch.from_numpy(pixels[mirrored]).permute(0, 3, 1, 2)
            pixels[mirrored] = torch.flip(planes, (3,)).permute(0, 2, 3, 1).numpy()
        if self.cutout:
            rows = self._in_hole(np.arange(height), plan.hole_y[:, None])
            columns = self._in_hole(np.arange(width), plan.hole_x[:, None])
            pixels[rows[:, :, None] & columns[:, None, :]] = 0
        return torch.from_numpy(pixels)

    def _in_hole(self, positions, centre):
        start = centre - self.cutout // 2
        return (positions >= start) & (positions < start + self.cutout)


def _mirror(index: Tensor, size: int) -> Tensor:
    """Positions outside 0 .. size - 1 reflected at the border, which is not repeated."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)
