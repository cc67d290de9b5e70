"""Random crop with padding, horizontal flip and cutout, for a whole batch of uint8 images.

Two steps, kept apart so that the choices do not depend on how an epoch is divided: `draw` chooses
for every sample of it, `apply` carries the choices out for any slice, on the device that holds
the images. Crop and flip: He et al., "Deep residual learning" (2016), section 4.2. Cutout: DeVries
and Taylor (2017).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from utils.errors import UserError
from utils.to_device import to_device

if TYPE_CHECKING:  # reading processes come here and do without PyTorch: they start at once
    from torch import Tensor


class CropFlipPlan(NamedTuple):
    """What happens to each of n samples; every array has shape (n,) and dtype int64."""

    top: np.ndarray  # first row of the crop in the padded image, 0 .. 2 * padding
    left: np.ndarray  # first column of it
    flip: np.ndarray  # 1: mirrored left to right
    hole_y: np.ndarray  # row of the centre of the hole that cutout leaves
    hole_x: np.ndarray  # column of it

    def slice(self, piece: slice) -> CropFlipPlan:
        return CropFlipPlan(*(choice[piece] for choice in self))


@dataclass
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
    packed_rows: ClassVar[int] = 6
    _room: _Room | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.mode not in ("zeros", "reflect"):
            raise ValueError(f"mode is 'zeros' or 'reflect', not {self.mode!r}")
        if self.padding >= min(self.height, self.width):
            raise UserError(
                f"padding {self.padding} is not smaller than the image "
                f"({self.height}x{self.width}): choose a smaller --crop_padding"
            )
        if self.cutout > max(self.height, self.width):
            raise UserError(
                f"--cutout {self.cutout} blanks the whole image ({self.height}x{self.width}): "
                "choose a smaller one"
            )

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_room": None}  # another process gets the settings, not the memory

    def draw(self, n: int, generator: np.random.Generator) -> CropFlipPlan:
        """Choices for n samples. What is off is drawn too, so that the others stay the same."""
        return CropFlipPlan(
            top=generator.integers(0, 2 * self.padding + 1, n),
            left=generator.integers(0, 2 * self.padding + 1, n),
            flip=(generator.random(n) < self.flip).astype(np.int64),
            hole_y=generator.integers(0, self.height, n),
            hole_x=generator.integers(0, self.width, n),
        )

    def apply(self, images, plan: CropFlipPlan, index: np.ndarray | None = None):
        """The pictures `images[index]`, cropped, mirrored and blanked as `plan` says.

        In host memory by copies of whole rows, elsewhere by one gather: equal to the bit.

        Args:
            images: (samples, height, width, channels) uint8, an array or a tensor; only read.
            plan: for n samples.
            index: (n,) int64, which pictures; None for all, in their order.
        Returns:
            (n, height, width, channels) uint8: an array for an array, a tensor for a tensor.
        """
        if index is None:
            index = np.arange(len(images))
        if isinstance(images, np.ndarray):
            return self.apply_rows(images, plan, index)
        if images.device.type != "cpu":
            return self.apply_gather(images, plan, index)
        import torch

        return torch.from_numpy(self.apply_rows(images.numpy(), plan, index))

    def apply_gather(self, images: Tensor, plan: CropFlipPlan, index: np.ndarray) -> Tensor:
        """The same on the device that holds `images`."""
        return self.carry_out(images, to_device(self.pack(plan, index), images.device))

    def pack(self, plan: CropFlipPlan, index: np.ndarray) -> np.ndarray:
        """(packed_rows, n) int64: all that `carry_out` needs, in one copy to a device."""
        return np.stack([index, *plan])

    def carry_out(self, images: Tensor, packed: Tensor) -> Tensor:
        """The definition: the source row and column of each target pixel, then one gather. Work of
        the device alone, which a CUDA graph can hold."""
        import torch

        sample, top, left, flip, hole_y, hole_x = packed
        n, (height, width) = len(sample), images.shape[1:3]
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
        picked = images[sample[:, None, None], y[:, :, None], x[:, None, :]]
        return picked.masked_fill_(blank[..., None], 0)

    def apply_rows(self, images: np.ndarray, plan: CropFlipPlan, index: np.ndarray) -> np.ndarray:
        """The same by NumPy, in few passes over memory: the pictures are padded, those to mirror
        behind the others, and every crop is cut out of its picture by whole rows."""
        n, p = len(index), self.padding
        if self._room is None or not self._room.fits(n, images):
            self._room = _Room(n, images, p)
        room = self._room
        mirrored = np.flatnonzero(plan.flip)
        order = np.concatenate([np.flatnonzero(plan.flip == 0), mirrored])
        first = n - len(mirrored)
        taken, inside = room.taken[:n], room.inside[:n]
        # With mode="clip" NumPy writes into `taken` without a copy of its own in between.
        np.take(images, index[order], axis=0, out=taken, mode="clip")
        inside[:first] = taken[:first]
        for channel in range(images.shape[3]):  # NumPy reverses one channel at a time fastest
            inside[first:, ..., channel] = taken[first:, :, ::-1, channel]
        if self.mode == "reflect" and p:
            _reflect_borders(room.padded[:n], p)
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)  # where each picture of the batch lies in the room
        # A mirrored picture is shifted the other way, as if it were mirrored after the crop.
        left = np.where(plan.flip, 2 * p - plan.left, plan.left)
        rows = room.windows[place, plan.top, left]  # (n, height), a row of pixels each
        pixels = rows.view(np.uint8).reshape(n, *images.shape[1:])
        if self.cutout:
            rows = self._in_hole(np.arange(self.height), plan.hole_y[:, None])
            columns = self._in_hole(np.arange(self.width), plan.hole_x[:, None])
            pixels[rows[:, :, None] & columns[:, None, :]] = 0
        return pixels

    def _in_hole(self, positions, centre):
        start = centre - self.cutout // 2
        return (positions >= start) & (positions < start + self.cutout)


def _mirror(index: Tensor, size: int) -> Tensor:
    """Positions outside 0 .. size - 1 reflected at the border, which is not repeated."""
    index = index.abs()
    return index.where(index < size, 2 * (size - 1) - index)


class _Room:
    """Memory for the pictures of a batch, as they are and padded.

    It is kept from batch to batch: to allocate it would cost more than to fill it. The borders
    are black from the start and stay so.
    """

    def __init__(self, n: int, images: np.ndarray, p: int):
        height, width, channels = images.shape[1:]
        self.taken = np.empty((n, height, width, channels), np.uint8)
        self.padded = np.zeros((n, height + 2 * p, width + 2 * p, channels), np.uint8)
        self.inside = self.padded[:, p : p + height, p : p + width]
        # [picture, top, left] is a crop: `height` rows, each moved as one piece of memory.
        strides = self.padded.strides
        self.windows = np.ndarray(
            (n, 2 * p + 1, 2 * p + 1, height),
            np.dtype((np.void, width * channels)),
            self.padded,
            strides=(*strides[:3], strides[1]),
        )

    def fits(self, n: int, images: np.ndarray) -> bool:
        return n <= len(self.taken) and images.shape[1:] == self.taken.shape[1:]


def _reflect_borders(padded: np.ndarray, p: int) -> None:
    """Fills p rows and columns on every side with the mirror image of what lies inside."""
    inside = padded[:, p:-p]
    inside[:, :, :p] = inside[:, :, p + 1 : 2 * p + 1][:, :, ::-1]
    inside[:, :, -p:] = inside[:, :, -2 * p - 1 : -p - 1][:, :, ::-1]
    padded[:, :p] = padded[:, p + 1 : 2 * p + 1][:, ::-1]
    padded[:, -p:] = padded[:, -2 * p - 1 : -p - 1][:, ::-1]
