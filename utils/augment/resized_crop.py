"""Random resized crop and horizontal flip: of encoded pictures, carried out by their decoder, and
of decoded ones.

A window covers a random part of the picture's area, at a random aspect ratio and place, and is
resized to the size of the batch: Szegedy et al., "Going deeper with convolutions" (2015). Areas,
ratios and places are distributed as in torchvision's RandomResizedCrop, which draws area and ratio
until the window fits into the picture. Here the ratio is drawn from its distribution among windows
that fit, so that every sample takes equally many random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..to_device import to_device
from .chain import Augmentation

if TYPE_CHECKING:
    from torch import Tensor

RATIO = 3 / 4, 4 / 3  # width / height
STEPS = 50  # of bisection: halves the interval of logarithms of RATIO to less than a rounding error


class ResizedCropPlan(NamedTuple):
    """The choices for n samples, each of shape (n,); all but `flip` are uniform in [0, 1)."""

    ratio: np.ndarray
    area: np.ndarray
    top: np.ndarray
    left: np.ndarray
    flip: np.ndarray  # int64; 1: mirror left to right


@dataclass(frozen=True)
class ResizedCrop(Augmentation):
    """Crop a window of at least `area` of the picture, mirror with probability `flip`.

    Args:
        area: least area of a window, as a fraction of the picture's, in (0, 1].
        flip: probability of mirroring, 0 to 1.
    """

    area: float = 0.08
    flip: float = 0.5
    reads_encoded = True

    def draw(self, n: int, generator: np.random.Generator) -> ResizedCropPlan:
        """A plan for n samples; uses the same number of random numbers for every sample."""
        ratio, area, top, left, flip = generator.random((5, n))
        return ResizedCropPlan(ratio, area, top, left, (flip < self.flip).astype(np.int64))

    def apply(self, images: Any, plan: ResizedCropPlan, index: np.ndarray | None = None) -> Any:
        """As of any augmentation, but of `images` with `sizes(index)` and `decode(index, windows,
        flips)`, as EncodedPictures."""
        return images.decode(index, self.windows(plan, images.sizes(index)), plan.flip)

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


SHARPNESS = -0.5  # `a` of the cubic: that of Pillow, and of PyTorch with antialiasing


class DecodedCrop(ResizedCrop):
    """The same of decoded pictures, a whole batch at once on the device that holds them: resized to
    the size that they have."""

    reads_encoded = False

    def apply(self, images: Tensor, plan: ResizedCropPlan, index: np.ndarray | None = None) -> Any:
        """On a GPU resizing is two products with matrices of weights for each sample, one for its
        rows and one for its columns. On a CPU PyTorch resizes one window after the other, which is
        faster there."""
        assert index is None  # it follows one that gathers
        n, height, width = images.shape[:3]
        windows = self.windows(plan, np.broadcast_to([height, width], (n, 2)))
        if images.device.type == "cpu":
            return _one_by_one(images, windows, plan.flip)
        choices = np.concatenate([windows, plan.flip[:, None]], 1).T.astype(np.float32)
        choices = to_device(np.ascontiguousarray(choices), images.device)
        return crop_and_resize(images, choices, (height, width))


def _one_by_one(images: Tensor, windows: np.ndarray, flips: np.ndarray) -> Tensor:
    """`crop_and_resize` to the same size on a CPU. windows: (n, 4), flips: (n,)."""
    import torch

    result = torch.empty_like(images)
    sources, targets = images.permute(0, 3, 1, 2), result.permute(0, 3, 1, 2)
    how = {"size": images.shape[1:3], "mode": "bicubic", "antialias": True}
    choices = enumerate(zip(windows.tolist(), flips.tolist(), strict=True))
    for i, ((top, left, height, width), flip) in choices:
        window = sources[i : i + 1, :, top : top + height, left : left + width]
        resized = torch.nn.functional.interpolate(window, **how)
        targets[i : i + 1] = resized.flip(3) if flip else resized
    return result


def crop_and_resize(images: Tensor, choices: Tensor, size: tuple[int, int]) -> Tensor:
    """The windows of the pictures, resized as by torchvision's resized_crop, bicubic and
    antialiased; values differ from its by 2 of 255 at most.

    Args:
        images: (n, height, width, channels) uint8.
        choices: (5, n) float32: top, left, height and width of each window in pixels; 1: mirrored.
        size: height and width of the result.
    """
    import torch

    n, height, width, channels = images.shape
    top, left, window_height, window_width, mirrored = choices
    columns = bicubic_weights(left, window_width, width, size[1])
    columns = torch.where(mirrored.view(n, 1, 1) == 1, columns.flip(1), columns)
    rows = bicubic_weights(top, window_height, height, size[0])
    pixels = images.permute(0, 1, 3, 2).to(torch.float32, memory_format=torch.contiguous_format)
    pixels = torch.bmm(pixels.view(n, height * channels, width), columns.mT)
    pixels = pixels.round_().clamp_(0, 255).view(n, height, channels * size[1])
    pixels = torch.bmm(rows, pixels).round_().clamp_(0, 255)
    return pixels.view(n, size[0], channels, size[1]).byte().permute(0, 1, 3, 2).contiguous()


def bicubic_weights(start: Tensor, length: Tensor, size: int, out: int) -> Tensor:
    """(n, out, size): weights of the pixels along one side of the picture for those of the result.

    Args:
        start, length: (n,) of the windows, in pixels.
        size: of that side of the picture.
        out: of that side of the result.
    """
    import torch

    start, end = start.view(-1, 1, 1), (start + length).view(-1, 1, 1)
    scale = (end - start) / out  # of a pixel of the result, in pixels of the picture
    places = torch.arange(out, device=start.device).view(-1, 1) + 0.5
    centre = start + scale * places  # (n, out, 1)
    scale = scale.clamp(min=1)
    # Of any window, these are all that may have a weight: the kernel reaches two to either side.
    taps = 2 * math.ceil(2 * max(size / out, 1)) + 1
    pixels = (centre - 2 * scale).floor() + torch.arange(taps, device=start.device)
    weights = _cubic((pixels + 0.5 - centre).abs_().div_(scale))
    weights.mul_((pixels >= start) & (pixels < end))
    weights.div_(weights.sum(2, keepdim=True))
    whole = torch.zeros(len(weights), out, size, device=start.device)
    return whole.scatter_add_(2, pixels.clamp_(0, size - 1).long(), weights)


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel, of distances (x >= 0)."""
    a = SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return near.where(x < 1, far.where(x < 2, 0))
