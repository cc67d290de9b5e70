"""Operations on a batch of pictures, each with its own argument, on the device that holds them.

Every function takes and returns (n, channels, height, width) uint8, with 1 or 3 channels, and
equals torchvision's function of the same name, called for one picture after the other: no value
differs by more than 1 of 255. None of them makes the host wait.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .policies import Operation

BLUR_RADIUS = 6  # pixels: three standard deviations of the widest blur of --auto_augment 3a


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """mean + factor * (x - mean), with the mean of the grey picture. `factors`: (n,) float32."""
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """grey + factor * (x - grey). `factors`: (n,) float32; 0 gives a grey picture."""
    return images if images.shape[1] == 1 else _blend(images, _grey(images), factors)


def adjust_sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """smooth + factor * (x - smooth), but at the border, which is left as it is. Smooth is the mean
    of 3 x 3 pixels, in which the middle one counts five times. `factors`: (n,) float32."""
    if min(images.shape[2:]) <= 2:
        return images
    pixels = images.float()
    inside = pixels[..., 1:-1, 1:-1]
    rows = pixels[..., :-2, :] + pixels[..., 1:-1, :] + pixels[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]  # of 3 x 3 pixels
    smooth = total.add_(inside, alpha=4).div_(13).round_()
    inside.copy_(smooth.lerp_(inside, factors.view(-1, 1, 1, 1)))
    return pixels.clamp_(0, 255).byte()


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turns the colours by `shifts`, (n,) float32, in whole turns: -0.5 to 0.5."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images.float() / 255).unbind(1)  # (n, height, width)
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - torch.minimum(torch.minimum(red, green), blue)
    divisor = torch.where(chroma == 0, 1, chroma)
    sector = torch.where(high == green, (blue - red) / divisor + 2, (red - green) / divisor + 4)
    sector = torch.where(high == red, (green - blue) / divisor, sector)  # hue, 6 to a turn
    sector.add_(6 * shifts.view(-1, 1, 1))
    # Each channel falls from `high` to `low` and rises again, two sectors after the one before it.
    channels = []
    for start in (5, 3, 1):
        place = (sector + start).remainder_(6)
        fall = torch.minimum(place, 4 - place).clamp_(0, 1)
        channels.append(fall.mul_(chroma).neg_().add_(high))
    # 255.999 makes equal parts of 0 to 1, as torchvision's conversion to uint8 does.
    return torch.stack(channels, 1).mul_(255.999).byte()


def autocontrast(images: Tensor) -> Tensor:
    """Stretches each channel to 0 to 255; one of a single value is left as it is."""
    low, high = (f((2, 3), keepdim=True).float() for f in (images.amin, images.amax))
    constant = low == high
    scale = (high - low).div_(255).masked_fill_(constant, 1)
    return (images - low.masked_fill_(constant, 0)).div_(scale).clamp_(0, 255).byte()


def equalize(images: Tensor) -> Tensor:
    """Spreads the values of each channel so that all of 0 to 255 are about equally frequent."""
    values = images.reshape(-1, images.shape[2] * images.shape[3]).long()  # (n * channels, pixels)
    count = torch.zeros(len(values), 256, dtype=torch.int64, device=images.device)
    count.scatter_add_(1, values, torch.ones_like(values))
    up_to = count.cumsum(1)  # pixels of at most that value
    highest = count.gather(1, up_to.argmax(1, keepdim=True))  # pixels of the highest value
    step = (values.shape[1] - highest).div_(255, rounding_mode="floor")  # (n * channels, 1)
    tables = (up_to - count).add_(step // 2).div_(step.clamp(min=1), rounding_mode="floor")
    unchanged = torch.arange(256, device=images.device).expand_as(tables)
    tables = torch.where(step == 0, unchanged, tables.clamp_(0, 255)).byte()
    return tables.gather(1, values).view(images.shape)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replaces each value by what the picture's table has for it. `tables`: (n, 256) uint8."""
    return tables.gather(1, images.flatten(1).long()).view(images.shape)


def warp(images: Tensor, matrices: Tensor, fill: Tensor | None) -> Tensor:
    """Bilinear affine transformation.

    Args:
        matrices: (n, 2, 3) float32 from `grid_matrices`.
        fill: (channels,) float32, the colour of pixels from outside the picture; None: black.
    """
    pixels = images.float()
    if fill is not None:  # another channel tells how much of a pixel comes from inside
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
    pixels = F.grid_sample(pixels, _grid(matrices, *images.shape[2:]), align_corners=False)
    if fill is not None:
        colour = fill.view(-1, 1, 1)
        pixels = (pixels[:, :-1] - colour).mul_(pixels[:, -1:]).add_(colour)
    return pixels.round_().byte()


def _grid(matrices: Tensor, height: int, width: int) -> Tensor:
    """(n, height, width, 2) for grid_sample; three times as fast as affine_grid on a CPU."""
    x = (torch.arange(width, device=matrices.device) * 2 + 1) / width - 1  # -1 to 1, at the centres
    y = (torch.arange(height, device=matrices.device) * 2 + 1) / height - 1
    by_x, by_y, shift = matrices[:, None, None].unbind(-1)  # (n, 1, 1, 2)
    return (by_x * x[:, None]).add(by_y * y[:, None, None] + shift)


def gaussian_blur(images: Tensor, sigmas: Tensor) -> Tensor:
    """Of 13 pixels, fewer in a small picture; mirrored at the border. `sigmas`: (n,) float32,
    standard deviations in pixels."""
    n, channels, height, width = images.shape
    radius = min(BLUR_RADIUS, height - 1, width - 1)
    distance = torch.arange(-radius, radius + 1, device=images.device)
    kernels = (-0.5 * (distance / sigmas[:, None]) ** 2).softmax(1)  # (n, 2 * radius + 1)
    kernels = kernels.repeat_interleave(channels, 0)[:, None]
    pixels = F.pad(images.reshape(1, -1, height, width).float(), [radius] * 4, "reflect")
    pixels = F.conv2d(pixels, kernels[:, :, None], groups=n * channels)
    pixels = F.conv2d(pixels, kernels[..., None], groups=n * channels)
    return pixels.round_().byte().view(images.shape)


def _grey(images: Tensor) -> Tensor:
    """(n, 1, height, width) float32, whole numbers."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.split(1, 1)
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    """factor * images + (1 - factor) * other, cut off to 0 to 255."""
    factors = factors.view(-1, 1, 1, 1)
    return (images * factors).add_(other * (1 - factors)).clamp_(0, 255).byte()


# ---- on the host --------------------------------------------------------------------------------

VALUES = np.arange(256)


def brightness_tables(factors: np.ndarray) -> np.ndarray:
    """(n, 256) uint8 for `look_up`: x * factor."""
    product = VALUES.astype(np.float32) * factors[:, None].astype(np.float32)
    return np.minimum(product, 255).astype(np.uint8)


def posterize_tables(bits: np.ndarray) -> np.ndarray:
    """The highest `bits`, 0 to 8, of each value."""
    return (VALUES & (256 - 2 ** (8 - bits[:, None].astype(np.int64)))).astype(np.uint8)


def solarize_tables(thresholds: np.ndarray) -> np.ndarray:
    """255 - x from the threshold on."""
    return np.where(thresholds[:, None] <= VALUES, 255 - VALUES, VALUES).astype(np.uint8)


def solarize_add_tables(addends: np.ndarray) -> np.ndarray:
    """x + addend below 128; timm's, without a counterpart in torchvision."""
    added = np.minimum(VALUES + addends[:, None].astype(np.int64), 255)
    return np.where(VALUES < 128, added, VALUES).astype(np.uint8)


def invert_tables(unused: np.ndarray) -> np.ndarray:
    """255 - x."""
    return np.repeat(255 - VALUES[None], len(unused), 0).astype(np.uint8)


def shear_x(tangents: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n, 2, 3) float64: from the place of a pixel of the result to that in the picture, x before
    y, in pixels from the centre. Rows move sideways, the uppermost one the least."""
    return _matrices(tangents, {(0, 1): tangents, (0, 2): tangents * height / 2})


def shear_y(tangents: np.ndarray, height: int, width: int) -> np.ndarray:
    """Columns move up or down, the first one the least."""
    return _matrices(tangents, {(1, 0): tangents, (1, 2): tangents * width / 2})


def translate_x(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """To the right."""
    return _matrices(pixels, {(0, 2): -pixels})


def translate_y(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Downwards."""
    return _matrices(pixels, {(1, 2): -pixels})


def rotate(degrees: np.ndarray, height: int, width: int) -> np.ndarray:
    """Counter-clockwise, about the centre."""
    cosine, sine = np.cos(degrees * math.pi / 180), np.sin(degrees * math.pi / 180)
    return _matrices(degrees, {(0, 0): cosine, (0, 1): -sine, (1, 0): sine, (1, 1): cosine})


def grid_matrices(matrices: np.ndarray, height: int, width: int) -> np.ndarray:
    """float32 for `warp`, where places are -1 to 1 from edge to edge."""
    half = np.array([width, height], np.float64) / 2
    return (matrices * [*half, 1] / half[:, None]).astype(np.float32)


def _matrices(arguments: np.ndarray, entries: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """(n, 2, 3), which move nothing but for these entries."""
    matrices = np.repeat(np.eye(3)[None, :2], len(arguments), 0)
    for (row, column), values in entries.items():
        matrices[:, row, column] = values
    return matrices


# What makes the tables of `look_up`, and the matrices of `warp`.
TABLES = {
    Operation.BRIGHTNESS: brightness_tables,
    Operation.POSTERIZE: posterize_tables,
    Operation.SOLARIZE: solarize_tables,
    Operation.SOLARIZE_ADD: solarize_add_tables,
    Operation.INVERT: invert_tables,
}
WARPS = {
    Operation.SHEAR_X: shear_x,
    Operation.SHEAR_Y: shear_y,
    Operation.TRANSLATE_X: translate_x,
    Operation.TRANSLATE_Y: translate_y,
    Operation.ROTATE: rotate,
}
