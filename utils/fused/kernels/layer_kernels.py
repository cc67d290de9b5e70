"""Triton kernels for the layers of a Transformer: GELU, dropout, residual and LayerNorm.

Hendrycks and Gimpel, "Gaussian error linear units" (2016), arXiv:1606.08415, with the error
function; Ba, Kiros and Hinton, "Layer normalization" (2016), arXiv:1607.06450. A mask of dropout
(uint8, 1 for what is kept) is drawn by PyTorch and read here; None: nothing is dropped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils.fused.kernels import ceil_div, power_of_2

BLOCK = 1024  # values of a program, element by element
TILE = 2048  # values of a program at a time, where sums over rows are wanted
PROGRAMS = 512  # share the rows then, at most
ROOT_HALF, ROOT_2_PI = tl.constexpr(0.5**0.5), tl.constexpr((2 * torch.pi) ** -0.5)


def _options(block: int) -> dict:
    return {"num_warps": min(16, max(1, block // 256)), "enable_fp_fusion": True}


def _check(*tensors: Tensor | None) -> None:
    """Raises ValueError."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(t.shape != given[0].shape or not t.is_contiguous() for t in given):
        raise ValueError("the kernels take contiguous tensors of one shape")


def _elements(kernel, out: Tensor, *arguments) -> Tensor:
    _check(out, *(a for a in arguments if isinstance(a, Tensor)))
    count = out.numel()
    kernel[(ceil_div(count, BLOCK),)](out, *arguments, count, BLOCK, **_options(BLOCK))
    return out


# ---- element by element -------------------------------------------------------------------------


def add_dropped(x: Tensor | None, branch: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """x + branch mask factor, of x's dtype; without x of the branch's."""
    out = torch.empty_like(branch if x is None else x)
    return _elements(_add_dropped, out, x, branch, mask, factor)


@triton.jit
def _add_dropped(out, x, branch, mask, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(branch + at, mask=inside, other=0).to(tl.float32)
    if mask is not None:
        value = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, value * factor, 0.0)
    if x is not None:
        value += tl.load(x + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, value, mask=inside)


def gelu_dropped(x: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """gelu(x) mask factor."""
    return _elements(_gelu_dropped, torch.empty_like(x), x, mask, factor)


@triton.jit
def _gelu_dropped(out, x, mask, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    value = 0.5 * value * (1.0 + tl.erf(value * ROOT_HALF))
    if mask is not None:
        value = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, value * factor, 0.0)
    tl.store(out + at, value, mask=inside)


def gelu_dropped_backward(grad: Tensor, x: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """The gradient of x from that of gelu(x) mask factor."""
    return _elements(_gelu_dropped_backward, torch.empty_like(x), grad, x, mask, factor)


@triton.jit
def _gelu_dropped_backward(out, grad, x, mask, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    of_y = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    if mask is not None:
        of_y = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, of_y * factor, 0.0)
    below = 0.5 * (1.0 + tl.erf(value * ROOT_HALF))
    density = ROOT_2_PI * tl.exp(-0.5 * value * value)
    tl.store(out + at, of_y * (below + value * density), mask=inside)


# ---- LayerNorm ----------------------------------------------------------------------------------


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    mask: Tensor | None,
    factor: float,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z = x + branch mask factor, (rows, width), x itself without a branch; LayerNorm(z), of
    `dtype`; mean and 1 / sqrt(variance + eps) of each row of z, (rows, 1), float32."""
    _check(x, branch, mask)
    rows, width = x.shape
    block = power_of_2(width)
    z = x if branch is None else torch.empty_like(x)
    normal = torch.empty_like(x, dtype=dtype)
    mean, inverse = x.new_empty(2, rows, 1, dtype=torch.float32)
    _add_norm[(rows,)](
        z, normal, mean, inverse, x, branch, mask, factor, scale, shift, eps, width, block,
        **_options(block),
    )  # fmt: skip
    return z, normal, mean, inverse


@triton.jit
def _add_norm(
    z, normal, mean, inverse, x, branch, mask, factor, scale, shift, eps, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if branch is not None:
        other = tl.load(branch + at, mask=inside, other=0).to(tl.float32)
        if mask is not None:
            other = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, other * factor, 0.0)
        value += other
        tl.store(z + at, value, mask=inside)
        value = value.to(z.dtype.element_ty).to(tl.float32)  # what the backward pass will read
    middle = tl.sum(value) / width
    apart = tl.where(inside, value - middle, 0.0)
    factor_of_row = 1.0 / tl.sqrt(tl.sum(apart * apart) / width + eps)
    tl.store(mean + row, middle)
    tl.store(inverse + row, factor_of_row)
    times = tl.load(scale + column, mask=inside, other=0).to(tl.float32)
    plus = tl.load(shift + column, mask=inside, other=0).to(tl.float32)
    tl.store(normal + at, apart * factor_of_row * times + plus, mask=inside)


def norm_backward(
    grad: Tensor,
    z: Tensor,
    mean: Tensor,
    inverse: Tensor,
    scale: Tensor,
    residual: Tensor | None,
    branch: torch.dtype | None,
    mask: Tensor | None,
    factor: float,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients of z (and so of x), of the branch, of scale and shift: see add_norm.

    Args:
        grad: of LayerNorm(z).
        residual: what else is added to the gradient of z.
        branch: the dtype of its gradient; None: it is not wanted.
    """
    _check(grad, z, residual, mask)
    rows, width = z.shape
    block = power_of_2(width)
    # Several rows at a time: one has too few bytes on their way to make use of the memory.
    tile = max(1, min(16, TILE // block))
    programs = min(ceil_div(rows, tile), PROGRAMS)
    of_z = torch.empty_like(z)
    of_branch = None if branch is None else torch.empty_like(z, dtype=branch)
    parts = z.new_empty(programs, 2, width, dtype=torch.float32)
    _norm_backward[(programs,)](
        of_z, of_branch, parts, grad, z, mean, inverse, scale, residual, mask, factor, rows, width,
        programs, tile, block, **_options(tile * block),
    )  # fmt: skip
    of_scale, of_shift = parts.sum(0)
    return of_z, of_branch, of_scale.to(scale.dtype), of_shift.to(scale.dtype)


@triton.jit
def _norm_backward(
    of_z, of_branch, parts, grad, z, mean, inverse, scale, residual, mask, factor, rows, width,
    programs, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < width
    inverse_width = 1.0 / width
    times = tl.load(scale + column, mask=real, other=0).to(tl.float32)
    of_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        at = row[:, None].to(tl.int64) * width + column[None, :]
        of_normal = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        value = tl.load(z + at, mask=inside, other=0).to(tl.float32)
        middle = tl.load(mean + row, mask=row < rows, other=0)
        factor_of_row = tl.load(inverse + row, mask=row < rows, other=0)
        x = tl.where(inside, (value - middle[:, None]) * factor_of_row[:, None], 0.0)
        of_scale += of_normal * x
        of_shift += of_normal
        of_x = of_normal * times[None, :]
        plain = tl.sum(of_x, 1) * inverse_width
        slope = tl.sum(of_x * x, 1) * inverse_width
        found = (of_x - plain[:, None] - x * slope[:, None]) * factor_of_row[:, None]
        if residual is not None:
            found += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        tl.store(of_z + at, found, mask=inside)
        if of_branch is not None:
            if mask is not None:
                kept = tl.load(mask + at, mask=inside, other=0) != 0
                found = tl.where(kept, found * factor, 0.0)
            tl.store(of_branch + at, found, mask=inside)
    at = parts + first * 2 * width + column
    tl.store(at, tl.sum(of_scale, 0), mask=real)
    tl.store(at + width, tl.sum(of_shift, 0), mask=real)
