"""Triton kernels for BatchNorm and ReLU in channels_last: rows of channels, one for each pixel.

Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
covariate shift" (2015), arXiv:1502.03167. Means and variances are those of parts, put together as
in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979): no difference of large numbers.

A program works on tiles of ROWS rows and BLOCK channels. Where sums over the rows are wanted, at
most PROGRAMS of them share the rows, and another kernel adds up what they found.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils.fused.kernels import ceil_div, power_of_2

TILE = 4096  # values
PROGRAMS = 512  # enough for four on each processor of today's GPUs
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


class Numbers(NamedTuple):
    """Of each channel, (channels,), float32."""

    mean: Tensor
    spread: Tensor  # 1 / sqrt(variance + eps)
    scale: Tensor  # BatchNorm(c) = c scale + shift
    shift: Tensor


class Layout(NamedTuple):
    rows: int
    channels: int
    tile: int  # rows of a tile
    block: int  # channels of it
    blocks: int
    tiles: int  # of a block
    programs: int  # that share the rows of a block


def layout_of(*images: Tensor) -> Layout:
    """Raises ValueError where an image is not in channels_last or has another shape."""
    shape = images[0].shape
    for image in images:
        if image.shape != shape or not image.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("the kernels take images of one shape, in channels_last")
    return _layout(shape, TILE, PROGRAMS)


@functools.lru_cache(maxsize=1024)  # a step asks two hundred times, and by a few shapes
def _layout(shape: torch.Size, values: int, most: int) -> Layout:
    """In tiles of so many values, and for at most so many programs."""
    n, channels, height, width = shape
    rows = n * height * width
    block = min(128, power_of_2(channels))
    tile, blocks = values // block, ceil_div(channels, block)
    tiles = ceil_div(rows, tile)
    return Layout(rows, channels, tile, block, blocks, tiles, min(tiles, max(1, most // blocks)))


def try_out(device: str) -> None:
    """Compiles a kernel and starts it; raises whatever stands in the way."""
    c = torch.ones(1, 1, 1, 1, device=device)
    affine(c, c.view(1), c.view(1), True, out=torch.empty_like(c))


# ---- relu(c scale + shift + ...) ----------------------------------------------------------------


def affine(
    c: Tensor,
    scale: Tensor,
    shift: Tensor,
    relu: bool,
    kept: Tensor | None = None,
    keep: float = 1.0,
    add: Tensor | None = None,
    add_scale: Tensor | None = None,
    add_shift: Tensor | None = None,
    *,
    out: Tensor,
) -> Tensor:
    """relu((c scale + shift) kept / keep + add), or what of it is there.

    Args:
        c, add, out: (n, channels, height, width).
        scale, shift: (channels,); those of `add` make add add_scale + add_shift of it.
        kept: a number for each sample, n of them.
    """
    layout = layout_of(c, out, *([] if add is None else [add]))
    _affine[(layout.tiles * layout.blocks,)](
        out, c, scale, shift, kept, keep, add, add_scale, add_shift, layout.rows, layout.channels,
        c.shape[2] * c.shape[3], relu, layout.tile, layout.block, **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit
def _affine(
    out, c, scale, shift, kept, keep, add, add_scale, add_shift, rows, channels, pixels,
    RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    program = tl.program_id(0)
    row = program // blocks * ROWS + tl.arange(0, ROWS)
    channel = program % blocks * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    inside = (row[:, None] < rows) & real[None, :]
    at = row[:, None].to(tl.int64) * channels + channel[None, :]
    value = tl.load(c + at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=real, other=0).to(tl.float32)
    offset = tl.load(shift + channel, mask=real, other=0).to(tl.float32)
    value = value * factor[None, :] + offset[None, :]
    if kept is not None:
        of_sample = tl.load(kept + row // pixels, mask=row < rows, other=0).to(tl.float32)
        value = value * of_sample[:, None] / keep
    if add is not None:
        other = tl.load(add + at, mask=inside, other=0).to(tl.float32)
        if add_scale is not None:
            factor = tl.load(add_scale + channel, mask=real, other=0).to(tl.float32)
            offset = tl.load(add_shift + channel, mask=real, other=0).to(tl.float32)
            other = other * factor[None, :] + offset[None, :]
        value += other
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays
    tl.store(out + at, value, mask=inside)


# ---- the batch's statistics ---------------------------------------------------------------------


def batch_numbers(
    c: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    share: float,
) -> Numbers:
    """Of BatchNorm over c (n, channels, height, width). Running statistics follow by `share`, the
    variance unbiased, unless they are None."""
    layout = layout_of(c)
    parts = c.new_empty(layout.programs, 3, layout.channels, dtype=torch.float32)
    _moments[(layout.programs * layout.blocks,)](
        parts, c, layout.rows, layout.channels, layout.programs, layout.tile, layout.block,
        **OPTIONS,
    )  # fmt: skip
    numbers = parts.new_empty(4, layout.channels)
    block = 16
    _numbers[(ceil_div(layout.channels, block),)](
        numbers, parts, weight, bias, eps, running_mean, running_var, share, layout.channels,
        layout.programs, power_of_2(layout.programs), block, **OPTIONS,
    )  # fmt: skip
    return Numbers(*numbers.unbind())


@triton.jit
def _moments(parts, c, rows, channels, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of what a program has seen of each channel: how many, their mean, and the sum of the squared
    distances from it. Every value of a tile has its own, by Welford's formula, until the end."""
    blocks = tl.cdiv(channels, BLOCK)
    first = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    count = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (channel[None, :] < channels)
        at = row[:, None].to(tl.int64) * channels + channel[None, :]
        value = tl.load(c + at, mask=inside, other=0).to(tl.float32)
        count += tl.where(row[:, None] < rows, 1.0, 0.0)
        change = tl.where(inside, value - mean, 0.0)
        mean += change * (1.0 / tl.where(count == 0, 1.0, count))
        squares += change * (value - mean)
    total = tl.sum(count)
    middle = tl.sum(mean * count, 0) / total
    apart = mean - middle[None, :]
    spread = tl.sum(squares + count * apart * apart, 0)
    at = parts + first * 3 * channels + channel
    tl.store(at, tl.zeros((BLOCK,), tl.float32) + total, mask=channel < channels)
    tl.store(at + channels, middle, mask=channel < channels)
    tl.store(at + 2 * channels, spread, mask=channel < channels)


@triton.jit
def _numbers(
    numbers, parts, weight, bias, eps, running_mean, running_var, share, channels, programs,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PROGRAMS)
    real = channel < channels
    inside = (part[:, None] < programs) & real[None, :]
    at = parts + part[:, None] * 3 * channels + channel[None, :]
    count = tl.load(at, mask=inside, other=0)
    means = tl.load(at + channels, mask=inside, other=0)
    squares = tl.load(at + 2 * channels, mask=inside, other=0)
    total = tl.sum(count, 0)
    total = tl.where(real, total, 2.0)  # of channels that are not there
    mean = tl.sum(count * means, 0) / total
    apart = means - mean[None, :]
    square = tl.sum(squares + count * apart * apart, 0)
    spread = (1.0 / tl.sqrt((square / total).to(tl.float64) + eps)).to(tl.float32)
    scale = spread
    if weight is not None:
        scale = spread * tl.load(weight + channel, mask=real, other=0).to(tl.float32)
    shift = -mean * scale
    if bias is not None:
        shift += tl.load(bias + channel, mask=real, other=0).to(tl.float32)
    tl.store(numbers + channel, mean, mask=real)
    tl.store(numbers + channels + channel, spread, mask=real)
    tl.store(numbers + 2 * channels + channel, scale, mask=real)
    tl.store(numbers + 3 * channels + channel, shift, mask=real)
    if running_mean is not None:
        old = tl.load(running_mean + channel, mask=real, other=0).to(tl.float32)
        tl.store(running_mean + channel, (1 - share) * old + share * mean, mask=real)
        old = tl.load(running_var + channel, mask=real, other=0).to(tl.float32)
        unbiased = square / (total - 1)
        tl.store(running_var + channel, (1 - share) * old + share * unbiased, mask=real)


# ---- the backward pass of BatchNorm, and of the ReLU behind it ----------------------------------


def gradient_sums(
    grad: Tensor,
    c: Tensor,
    numbers: Numbers,
    *,
    relu: bool = False,
    y: Tensor | None = None,
    gated: Tensor | None = None,
) -> Tensor:
    """sum(dy) and sum(dy x^), (2, channels) in float32, where x^ = (c - mean) spread.

    Args:
        grad: dy, or the gradient of the ReLU's output (n, channels, height, width).
        relu: of relu(c scale + shift).
        y: of a ReLU whose output is y.
        gated: where dy is written.
    """
    images = [image for image in (grad, c, y, gated) if image is not None]
    layout = layout_of(*images)
    parts = c.new_empty(layout.programs, 2, layout.channels, dtype=torch.float32)
    _gradient_sums[(layout.programs * layout.blocks,)](
        parts, gated, grad, c, y, *numbers, layout.rows, layout.channels, layout.programs, relu,
        layout.tile, layout.block, **OPTIONS,
    )  # fmt: skip
    return parts.sum(0)


@triton.jit
def _gradient_sums(
    parts, gated, grad, c, y, mean, spread, scale, shift, rows, channels, programs,
    RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    first = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    middle = tl.load(mean + channel, mask=real, other=0)
    factor = tl.load(scale + channel, mask=real, other=0)
    offset = tl.load(shift + channel, mask=real, other=0)
    plain = tl.zeros((ROWS, BLOCK), tl.float32)
    normal = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        at = row[:, None].to(tl.int64) * channels + channel[None, :]
        value = tl.load(c + at, mask=inside, other=0).to(tl.float32)
        of_y = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        if RELU:
            of_y = tl.where(value * factor[None, :] + offset[None, :] <= 0, 0.0, of_y)
        if y is not None:
            of_y = tl.where(tl.load(y + at, mask=inside, other=0).to(tl.float32) <= 0, 0.0, of_y)
        if gated is not None:
            tl.store(gated + at, of_y, mask=inside)
        plain += of_y
        normal += of_y * (value - middle[None, :])
    inverse = tl.load(spread + channel, mask=real, other=0)
    at = parts + first * 2 * channels + channel
    tl.store(at, tl.sum(plain, 0), mask=real)
    tl.store(at + channels, tl.sum(normal, 0) * inverse, mask=real)


def input_gradient(
    grad: Tensor, c: Tensor, numbers: Numbers, sums: Tensor, *, relu: bool, out: Tensor
) -> Tensor:
    """scale (dy - sum(dy) / N - x^ sum(dy x^) / N); `sums` and `relu` as in gradient_sums."""
    layout = layout_of(grad, c, out)
    _input_gradient[(layout.tiles * layout.blocks,)](
        out, grad, c, *numbers, sums, 1 / layout.rows, layout.rows, layout.channels, relu,
        layout.tile, layout.block, **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit
def _input_gradient(
    out, grad, c, mean, spread, scale, shift, sums, inverse_rows, rows, channels,
    RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    program = tl.program_id(0)
    row = program // blocks * ROWS + tl.arange(0, ROWS)
    channel = program % blocks * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    inside = (row[:, None] < rows) & real[None, :]
    at = row[:, None].to(tl.int64) * channels + channel[None, :]
    value = tl.load(c + at, mask=inside, other=0).to(tl.float32)
    of_y = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=real, other=0)
    if RELU:
        offset = tl.load(shift + channel, mask=real, other=0)
        of_y = tl.where(value * factor[None, :] + offset[None, :] <= 0, 0.0, of_y)
    middle = tl.load(mean + channel, mask=real, other=0)
    inverse = tl.load(spread + channel, mask=real, other=0)
    of_mean = tl.load(sums + channel, mask=real, other=0) * inverse_rows
    of_normal = tl.load(sums + channels + channel, mask=real, other=0) * inverse_rows * inverse
    rest = of_mean[None, :] + (value - middle[None, :]) * of_normal[None, :]
    tl.store(out + at, (of_y - rest) * factor[None, :], mask=inside)
