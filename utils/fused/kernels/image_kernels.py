"""Triton kernels for BatchNorm and ReLU in channels_last: a row of channels for each pixel.

Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
covariate shift" (2015), arXiv:1502.03167. Each program computes mean and variance of its rows;
these are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances" (1979), which takes no difference of large numbers.

A program works on tiles of ROWS rows and BLOCK channels. Sums over the rows are divided among at
most PROGRAMS programs. Of each group of ROWS programs the last one to end adds up the partial sums
of the group in their order, and the last of these those of all groups. The loops over tiles load
ahead (STAGES), since a program that waits for each tile leaves the memory idle.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ceil_div, power_of_2

# On an H200 none of twelve combinations is faster over all kernels (benchmarks/results/gpu.md).
TILE = 2048  # elements
PROGRAMS = 512  # enough for four on each processor of today's GPUs
STAGES = tl.constexpr(3)  # tiles in flight, the one that is computed included
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class ChannelValues(NamedTuple):
    """Per channel, (channels,), float32."""

    mean: Tensor
    inverse_std: Tensor  # 1 / sqrt(variance + eps)
    scale: Tensor  # BatchNorm(c) = c scale + shift
    shift: Tensor


class Layout(NamedTuple):
    rows: int
    channels: int
    tile: int  # rows per tile
    block: int  # channels per tile
    blocks: int  # of channels
    tiles: int  # per block of channels
    programs: int  # per block of channels, where sums are divided


def layout_of(*images: Tensor) -> Layout:
    """Raises ValueError unless all are in channels_last and of the same shape."""
    shape = images[0].shape
    for image in images:
        if image.shape != shape or not image.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("the kernels take images of one shape, in channels_last")
    return _layout(shape, TILE, PROGRAMS)


@functools.lru_cache(maxsize=1024)  # a step calls it two hundred times, with a few shapes
def _layout(shape: torch.Size, tile_elements: int, max_programs: int) -> Layout:
    n, channels, height, width = shape
    rows = n * height * width
    block = min(128, power_of_2(channels))
    tile, blocks = tile_elements // block, ceil_div(channels, block)
    tiles = ceil_div(rows, tile)
    programs = min(tiles, max(1, max_programs // blocks))
    return Layout(rows, channels, tile, block, blocks, tiles, programs)


def try_out(device: str) -> None:
    """Compiles and runs a kernel; raises whatever Triton raises."""
    c = torch.ones(1, 1, 1, 1, device=device)
    affine(c, c.view(1), c.view(1), True, out=torch.empty_like(c))


@functools.cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """How many programs of each group, and how many groups, have stored their sums. 0 between
    launches, which must therefore not overlap on this device."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _parts(c: Tensor, layout: Layout, count: int) -> tuple[Tensor, Tensor]:
    """Memory for so many sums of each program, of each group and of all; and `_arrivals`."""
    groups = ceil_div(layout.programs, layout.tile)
    shape = layout.programs + groups + 1, count, layout.channels
    arrivals = _arrivals(c.device, layout.blocks * (groups + 1))
    return c.new_empty(shape, dtype=torch.float32), arrivals


@triton.jit
def _is_last(arrived, expected):
    """Whether this program is the last of those expected to have stored its sums. It can then load
    those of the others: barriers order what a program's threads do in memory, and the atomic
    operation what programs do."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == expected - 1
    tl.debug_barrier()
    if last:
        tl.store(arrived, 0)
    return last


# ---- relu(c scale + shift + ...) ----------------------------------------------------------------


def affine(
    c: Tensor,
    scale: Tensor,
    shift: Tensor,
    relu: bool,
    path_mask: Tensor | None = None,
    keep_rate: float = 1.0,
    residual: Tensor | None = None,
    residual_scale: Tensor | None = None,
    residual_shift: Tensor | None = None,
    *,
    out: Tensor,
) -> Tensor:
    """relu((c scale + shift) path_mask / keep_rate + residual residual_scale + residual_shift);
    what is None is left out, and so is the ReLU unless `relu`.

    Args:
        c, residual, out: (n, channels, height, width).
        scale, shift, residual_scale, residual_shift: (channels,).
        path_mask: n elements.
    """
    layout = layout_of(c, out, *([] if residual is None else [residual]))
    _affine[(layout.tiles * layout.blocks,)](
        out, c, scale, shift, path_mask, keep_rate, residual, residual_scale, residual_shift,
        layout.rows, layout.channels, c.shape[2] * c.shape[3], relu, layout.tile, layout.block,
        **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit
def _affine(
    out, c, scale, shift, path_mask, keep_rate, residual, residual_scale, residual_shift, rows,
    channels, pixels, RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
    if path_mask is not None:
        kept = tl.load(path_mask + row // pixels, mask=row < rows, other=0).to(tl.float32)
        value = value * kept[:, None] / keep_rate
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        if residual_scale is not None:
            factor = tl.load(residual_scale + channel, mask=real, other=0).to(tl.float32)
            offset = tl.load(residual_shift + channel, mask=real, other=0).to(tl.float32)
            added = added * factor[None, :] + offset[None, :]
        value += added
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays
    tl.store(out + at, value, mask=inside)


# ---- the batch's statistics ---------------------------------------------------------------------


def batch_values(
    c: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    batches: Tensor | None = None,
) -> ChannelValues:
    """For BatchNorm of c (n, channels, height, width) by its batch statistics. Updates the running
    statistics, unless they are None, with weight `momentum`; their variance is unbiased.

    Args:
        batches: () int64, to which 1 is added.
    """
    layout = layout_of(c)
    parts, arrivals = _parts(c, layout, 3)
    values = parts.new_empty(4, layout.channels)
    _moments[(layout.programs * layout.blocks,)](
        values, parts, arrivals, c, weight, bias, eps, running_mean, running_var, momentum, batches,
        layout.rows, layout.channels, layout.programs, layout.tile, layout.block, **OPTIONS,
    )  # fmt: skip
    return ChannelValues(*values.unbind())


@triton.jit
def _moments(
    values, parts, arrivals, c, weight, bias, eps, running_mean, running_var, momentum, batches,
    rows, channels, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each program and channel, number of values, mean and sum of squared deviations from it;
    from all of them, `values`. Each element of the tile has its own by Welford's formula."""
    blocks = tl.cdiv(channels, BLOCK)
    first = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    channel = block * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    count = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        at = row[:, None].to(tl.int64) * channels + channel[None, :]
        value = tl.load(c + at, mask=inside, other=0).to(tl.float32)
        count += tl.where(row[:, None] < rows, 1.0, 0.0)
        delta = tl.where(inside, value - mean, 0.0)
        mean += delta * (1.0 / tl.where(count == 0, 1.0, count))
        squares += delta * (value - mean)
    total, mean, squares = _combined(count, mean, squares)
    _store_moments(parts, first, channel, channels, total, mean, squares)
    group, groups = first // ROWS, tl.cdiv(programs, ROWS)
    arrived = arrivals + block * (groups + 1)
    begin, end = group * ROWS, tl.minimum(group * ROWS + ROWS, programs)
    if _is_last(arrived + group, end - begin):
        total, mean, squares = _all_moments(parts, begin, end, block, channels, ROWS, BLOCK)
        _store_moments(parts, programs + group, channel, channels, total, mean, squares)
        if _is_last(arrived + groups, groups):
            begin, end = programs, programs + groups
            total, mean, squares = _all_moments(parts, begin, end, block, channels, ROWS, BLOCK)
            variance = (squares / total).to(tl.float64)
            inverse_std = (1.0 / tl.sqrt(variance + eps)).to(tl.float32)
            scale = inverse_std
            if weight is not None:
                scale = inverse_std * tl.load(weight + channel, mask=real, other=0).to(tl.float32)
            shift = -mean * scale
            if bias is not None:
                shift += tl.load(bias + channel, mask=real, other=0).to(tl.float32)
            tl.store(values + channel, mean, mask=real)
            tl.store(values + channels + channel, inverse_std, mask=real)
            tl.store(values + 2 * channels + channel, scale, mask=real)
            tl.store(values + 3 * channels + channel, shift, mask=real)
            if running_mean is not None:
                old = tl.load(running_mean + channel, mask=real, other=0).to(tl.float32)
                tl.store(running_mean + channel, (1 - momentum) * old + momentum * mean, mask=real)
                old = tl.load(running_var + channel, mask=real, other=0).to(tl.float32)
                new = (1 - momentum) * old + momentum * squares / (total - 1)
                tl.store(running_var + channel, new, mask=real)
            if batches is not None and block == 0:
                tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _store_moments(parts, part, channel, channels, count, mean, squares):
    at = parts + part * 3 * channels + channel
    tl.store(at, tl.zeros_like(mean) + count, mask=channel < channels)
    tl.store(at + channels, mean, mask=channel < channels)
    tl.store(at + 2 * channels, squares, mask=channel < channels)


@triton.jit
def _all_moments(parts, begin, end, block, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Those of the parts from `begin` to `end`. Each element of the tile combines every ROWS-th."""
    channel = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    count = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(begin, end, ROWS):
        part = start + tl.arange(0, ROWS)[:, None]
        at = parts + part * 3 * channels
        inside = (part < end) & (channel < channels)
        more = tl.load(at + block * BLOCK, mask=part < end, other=0)  # the same of each channel
        delta = tl.load(at + channels + channel, mask=inside, other=0) - mean
        added = tl.load(at + 2 * channels + channel, mask=inside, other=0)
        fraction = more / tl.maximum(count + more, 1.0)
        mean += delta * fraction
        squares += added + delta * delta * count * fraction
        count += more
    return _combined(count, mean, squares)


@triton.jit
def _combined(count, mean, squares):
    """Number of values, (), mean and squares of each column, (BLOCK,), from those of the elements,
    (ROWS, BLOCK); count is (ROWS, 1)."""
    total = tl.sum(count)
    column_mean = tl.sum(mean * count, 0) / total
    deviation = mean - column_mean[None, :]
    return total, column_mean, tl.sum(squares + count * deviation * deviation, 0)


# ---- the backward pass of BatchNorm, and of the ReLU that follows it -----------------------------


def gradient_sums(
    grad: Tensor,
    c: Tensor,
    values: ChannelValues,
    *,
    relu: bool = False,
    y: Tensor | None = None,
    relu_grad: Tensor | None = None,
) -> Tensor:
    """sum(dy) and sum(dy x^), (2, channels) in float32, where x^ = (c - mean) inverse_std.

    Args:
        grad: dy, the gradient of BatchNorm's output (n, channels, height, width); where a ReLU
            follows, the gradient of its output.
        relu: a ReLU follows, and its output relu(c scale + shift) is recomputed.
        y: the output of a ReLU that follows.
        relu_grad: memory for dy.
    """
    images = [image for image in (grad, c, y, relu_grad) if image is not None]
    layout = layout_of(*images)
    parts, arrivals = _parts(c, layout, 2)
    _gradient_sums[(layout.programs * layout.blocks,)](
        parts, arrivals, relu_grad, grad, c, y, *values, layout.rows, layout.channels,
        layout.programs, relu, layout.tile, layout.block, **OPTIONS,
    )  # fmt: skip
    return parts[-1]


@triton.jit
def _gradient_sums(
    parts, arrivals, relu_grad, grad, c, y, mean, inverse_std, scale, shift, rows, channels,
    programs, RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    first = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    channel = block * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    channel_mean = tl.load(mean + channel, mask=real, other=0)
    factor = tl.load(scale + channel, mask=real, other=0)
    offset = tl.load(shift + channel, mask=real, other=0)
    sum_dy = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_dy_x = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        at = row[:, None].to(tl.int64) * channels + channel[None, :]
        value = tl.load(c + at, mask=inside, other=0).to(tl.float32)
        dy = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        if RELU:
            dy = tl.where(value * factor[None, :] + offset[None, :] <= 0, 0.0, dy)
        if y is not None:
            dy = tl.where(tl.load(y + at, mask=inside, other=0).to(tl.float32) <= 0, 0.0, dy)
        if relu_grad is not None:
            tl.store(relu_grad + at, dy, mask=inside)
        sum_dy += dy
        sum_dy_x += dy * (value - channel_mean[None, :])
    inverse = tl.load(inverse_std + channel, mask=real, other=0)
    at = parts + first * 2 * channels + channel
    tl.store(at, tl.sum(sum_dy, 0), mask=real)
    tl.store(at + channels, tl.sum(sum_dy_x, 0) * inverse, mask=real)
    group, groups = first // ROWS, tl.cdiv(programs, ROWS)
    arrived = arrivals + block * (groups + 1)
    begin, end = group * ROWS, tl.minimum(group * ROWS + ROWS, programs)
    if _is_last(arrived + group, end - begin):
        _add_sums(parts, begin, end, programs + group, channel, channels, ROWS, BLOCK)
        if _is_last(arrived + groups, groups):
            end = programs + groups
            _add_sums(parts, programs, end, end, channel, channels, ROWS, BLOCK)


@triton.jit
def _add_sums(parts, begin, end, into, channel, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the sums of the parts from `begin` to `end` as part `into`."""
    sum_dy = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_dy_x = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(begin, end, ROWS):
        part = start + tl.arange(0, ROWS)[:, None]
        inside = (part < end) & (channel[None, :] < channels)
        at = parts + part * 2 * channels + channel[None, :]
        sum_dy += tl.load(at, mask=inside, other=0)
        sum_dy_x += tl.load(at + channels, mask=inside, other=0)
    of_sums = parts + into * 2 * channels + channel
    tl.store(of_sums, tl.sum(sum_dy, 0), mask=channel < channels)
    tl.store(of_sums + channels, tl.sum(sum_dy_x, 0), mask=channel < channels)


def input_gradient(
    grad: Tensor, c: Tensor, values: ChannelValues, sums: Tensor, *, relu: bool, out: Tensor
) -> Tensor:
    """scale (dy - sum(dy) / N - x^ sum(dy x^) / N), with the arguments and `sums` of
    gradient_sums."""
    layout = layout_of(grad, c, out)
    _input_gradient[(layout.tiles * layout.blocks,)](
        out, grad, c, *values, sums, 1 / layout.rows, layout.rows, layout.channels, relu,
        layout.tile, layout.block, **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit
def _input_gradient(
    out, grad, c, mean, inverse_std, scale, shift, sums, inverse_rows, rows, channels,
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
    dy = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=real, other=0)
    if RELU:
        offset = tl.load(shift + channel, mask=real, other=0)
        dy = tl.where(value * factor[None, :] + offset[None, :] <= 0, 0.0, dy)
    channel_mean = tl.load(mean + channel, mask=real, other=0)
    inverse = tl.load(inverse_std + channel, mask=real, other=0)
    mean_dy = tl.load(sums + channel, mask=real, other=0) * inverse_rows
    mean_dy_x = tl.load(sums + channels + channel, mask=real, other=0) * inverse_rows * inverse
    through_statistics = mean_dy[None, :] + (value - channel_mean[None, :]) * mean_dy_x[None, :]
    tl.store(out + at, (dy - through_statistics) * factor[None, :], mask=inside)
