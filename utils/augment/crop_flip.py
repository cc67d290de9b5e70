"""Random crop with padding, horizontal flip and cutout, for a whole batch of uint8 images.

Crop and flip: He et al., "Deep residual learning" (2016), section 4.2. Cutout: DeVries
and Taylor (2017), whose square has the mean colour; here it is black.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from ..errors import UserError
from .chain import Augmentation

if TYPE_CHECKING:  # worker processes import this file, and start fast without PyTorch
    from torch import Tensor


class CropFlipPlan(NamedTuple):
    """The choices for n samples; every array has shape (n,) and dtype int64."""

    top: np.ndarray  # first row of the crop in the padded image, 0 to 2 * padding
    left: np.ndarray  # first column
    flip: np.ndarray  # 1: mirror left to right
    hole_y: np.ndarray  # row of the centre of cutout's square
    hole_x: np.ndarray  # its column


@dataclass
class CropFlip(Augmentation):
    """Shift by up to `padding` pixels, mirror with probability `flip`, blacken a square.

    Args:
        height, width: size of the images in pixels, before and after.
        padding: pixels added on every side before the crop; 0: no crop.
        mode: content of the padding: "zeros" (black) or "reflect" (the mirrored image).
        flip: probability of mirroring, 0 to 1.
        cutout: side of the black square in pixels, 0 for none; it may extend beyond the image.
    """

    height: int
    width: int
    padding: int = 4
    mode: str = "zeros"
    flip: float = 0.5
    cutout: int = 0
    packed_rows: ClassVar[int] = 6
    _buffers: _Buffers | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.mode not in ("zeros", "reflect"):
            raise ValueError(f"mode is 'zeros' or 'reflect', not {self.mode!r}")
        if self.padding >= min(self.height, self.width):
            raise UserError(
                f"padding {self.padding} is not smaller than the picture "
                f"({self.height}x{self.width}): choose a smaller --crop_padding"
            )
        if self.cutout > max(self.height, self.width):
            raise UserError(
                f"--cutout {self.cutout} blanks the whole picture ({self.height}x{self.width}): "
                "choose a smaller one"
            )

    def __getstate__(self) -> dict:
        # Another process gets the settings, not the memory.
        return self.__dict__ | {"_buffers": None}

    def draw(self, n: int, generator: np.random.Generator) -> CropFlipPlan:
        """A plan for n samples. Random numbers are drawn for disabled features, too, so that
        enabling one does not change the others' choices."""
        return CropFlipPlan(
            top=generator.integers(0, 2 * self.padding + 1, n),
            left=generator.integers(0, 2 * self.padding + 1, n),
            flip=(generator.random(n) < self.flip).astype(np.int64),
            hole_y=generator.integers(0, self.height, n),
            hole_x=generator.integers(0, self.width, n),
        )

    def pack(self, plan: CropFlipPlan, index: np.ndarray | None = None) -> np.ndarray:
        return np.stack([np.arange(len(plan.top)) if index is None else index, *plan])

    def apply_packed(self, images: Tensor, packed: Tensor) -> Tensor:
        """By the source row and column of each target pixel, and one gather."""
        import torch

        sample, top, left, flip, hole_y, hole_x = packed
        n, (height, width) = len(sample), images.shape[1:3]
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        mirrored = torch.where(flip[:, None] == 1, width - 1 - columns, columns)
        # (n, height), from -padding to height - 1 + padding
        y = rows + top[:, None] - self.padding
        x = mirrored + left[:, None] - self.padding  # (n, width)
        blank = torch.zeros(n, height, width, dtype=torch.bool, device=images.device)
        if self.mode == "zeros":
            blank |= ((y < 0) | (y >= height))[:, :, None] | ((x < 0) | (x >= width))[:, None, :]
        if self.cutout:
            blank |= (
                self._in_square(rows, hole_y[:, None])[:, :, None]
                & self._in_square(columns, hole_x[:, None])[:, None, :]
            )
        y, x = _reflect(y, height), _reflect(x, width)
        gathered = images[sample[:, None, None], y[:, :, None], x[:, None, :]]
        return gathered.masked_fill_(blank[..., None], 0)

    def apply_to_array(
        self, images: np.ndarray, plan: CropFlipPlan, index: np.ndarray | None = None
    ) -> np.ndarray:
        """In few passes over memory: images are copied into padded buffers, those to be mirrored
        last, and each crop is copied from there row by row."""
        index = np.arange(len(images)) if index is None else index
        n, p = len(index), self.padding
        if self._buffers is None or not self._buffers.fits(n, images):
            self._buffers = _Buffers(n, images, p)
        buffers = self._buffers
        mirrored = np.flatnonzero(plan.flip)
        order = np.concatenate([np.flatnonzero(plan.flip == 0), mirrored])
        first = n - len(mirrored)
        unpadded, inside = buffers.unpadded[:n], buffers.inside[:n]
        # With mode="clip" NumPy writes into `unpadded` directly, without a temporary copy.
        np.take(images, index[order], axis=0, out=unpadded, mode="clip")
        inside[:first] = unpadded[:first]
        for channel in range(images.shape[3]):  # NumPy reverses one channel at a time fastest
            inside[first:, ..., channel] = unpadded[first:, :, ::-1, channel]
        if self.mode == "reflect" and p:
            _reflect_borders(buffers.padded[:n], p)
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)  # each image's index in the buffers
        # A mirrored image shifts the other way, as if it were mirrored after the crop.
        left = np.where(plan.flip, 2 * p - plan.left, plan.left)
        rows = buffers.windows[place, plan.top, left]  # (n, height), a row of pixels each
        pixels = rows.view(np.uint8).reshape(n, *images.shape[1:])
        if self.cutout:
            rows = self._in_square(np.arange(self.height), plan.hole_y[:, None])
            columns = self._in_square(np.arange(self.width), plan.hole_x[:, None])
            pixels[rows[:, :, None] & columns[:, None, :]] = 0
        return pixels

    def _in_square(self, positions, centre):
        start = centre - self.cutout // 2
        return (positions >= start) & (positions < start + self.cutout)


def _reflect(index: Tensor, size: int) -> Tensor:
    """Reflects indices outside 0 to size - 1; the border itself is not repeated."""
    index = index.abs()
    return index.where(index < size, 2 * (size - 1) - index)


class _Buffers:
    """Memory for a batch of images, unpadded and padded.

    Reused from batch to batch, since allocating it costs more than filling it. The padding is black
    from the start and stays so with mode "zeros".
    """

    def __init__(self, n: int, images: np.ndarray, p: int):
        height, width, channels = images.shape[1:]
        self.unpadded = np.empty((n, height, width, channels), np.uint8)
        self.padded = np.zeros((n, height + 2 * p, width + 2 * p, channels), np.uint8)
        self.inside = self.padded[:, p : p + height, p : p + width]
        # windows[image, top, left] is a crop: `height` rows, each copied as one element.
        strides = self.padded.strides
        self.windows = np.ndarray(
            (n, 2 * p + 1, 2 * p + 1, height),
            np.dtype((np.void, width * channels)),
            self.padded,
            strides=(*strides[:3], strides[1]),
        )

    def fits(self, n: int, images: np.ndarray) -> bool:
        return n <= len(self.unpadded) and images.shape[1:] == self.unpadded.shape[1:]


def _reflect_borders(padded: np.ndarray, p: int) -> None:
    """Fills p rows and columns on every side with the mirrored image."""
    inside = padded[:, p:-p]
    inside[:, :, :p] = inside[:, :, p + 1 : 2 * p + 1][:, :, ::-1]
    inside[:, :, -p:] = inside[:, :, -2 * p - 1 : -p - 1][:, :, ::-1]
    padded[:, :p] = padded[:, p + 1 : 2 * p + 1][:, ::-1]
    padded[:, -p:] = padded[:, -2 * p - 1 : -p - 1][:, ::-1]
