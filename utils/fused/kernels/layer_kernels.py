"""Triton kernels for the layers of a Transformer (GELU, dropout, residual, LayerNorm), and for the
cross-entropy of two mixed targets.

Hendrycks and Gimpel, "Gaussian error linear units" (2016), arXiv:1606.08415, with the error
function; Ba, Kiros and Hinton, "Layer normalization" (2016), arXiv:1607.06450. Dropout masks
(uint8, 1 where an element is kept) are drawn by PyTorch and read here; None: nothing is dropped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ceil_div, power_of_2

BLOCK = 1024  # elements per program of an elementwise kernel
TILE = 1024  # elements that a program holds at a time in a sum over rows
PROGRAMS = 512  # at most so many divide such a sum
STAGES = tl.constexpr(3)  # tiles in flight, the one that is computed included
ROOT_HALF, ROOT_2_PI = tl.constexpr(0.5**0.5), tl.constexpr((2 * torch.pi) ** -0.5)


def _options(block: int) -> dict:
    return {"num_warps": min(16, max(1, block // 256)), "enable_fp_fusion": True}


def _check(*tensors: Tensor | None) -> None:
    """Raises ValueError unless all are contiguous and of the same shape."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(t.shape != given[0].shape or not t.is_contiguous() for t in given):
        raise ValueError("the kernels take contiguous tensors of one shape")


def _elementwise(kernel, out: Tensor, *arguments) -> Tensor:
    _check(out, *(a for a in arguments if isinstance(a, Tensor)))
    count = out.numel()
    kernel[(ceil_div(count, BLOCK),)](out, *arguments, count, BLOCK, **_options(BLOCK))
    return out


# ---- elementwise --------------------------------------------------------------------------------


def add_dropped(
    x: Tensor | None, branch: Tensor, mask: Tensor | None, factor: float, dtype=None
) -> Tensor:
    """x + branch mask factor, in x's dtype; where x is None branch mask factor, in `dtype`."""
    out = torch.empty_like(branch if x is None else x, dtype=dtype)
    return _elementwise(_add_dropped, out, x, branch, mask, factor)


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
    return _elementwise(_gelu_dropped, torch.empty_like(x), x, mask, factor)


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
    """The gradient of x, from the gradient of gelu(x) mask factor."""
    return _elementwise(_gelu_dropped_backward, torch.empty_like(x), grad, x, mask, factor)


@triton.jit
def _gelu_dropped_backward(out, grad, x, mask, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    grad_y = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    if mask is not None:
        grad_y = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, grad_y * factor, 0.0)
    cdf = 0.5 * (1.0 + tl.erf(value * ROOT_HALF))
    density = ROOT_2_PI * tl.exp(-0.5 * value * value)
    tl.store(out + at, grad_y * (cdf + value * density), mask=inside)


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
    """z = x + branch mask factor, (rows, width), or x itself without a branch; LayerNorm(z) in
    `dtype`; each row's mean and 1 / sqrt(variance + eps), (rows, 1), float32."""
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
        value = value.to(z.dtype.element_ty).to(tl.float32)  # as the backward pass reads it
    row_mean = tl.sum(value) / width
    deviation = tl.where(inside, value - row_mean, 0.0)
    inverse_std = 1.0 / tl.sqrt(tl.sum(deviation * deviation) / width + eps)
    tl.store(mean + row, row_mean)
    tl.store(inverse + row, inverse_std)
    weight = tl.load(scale + column, mask=inside, other=0).to(tl.float32)
    bias = tl.load(shift + column, mask=inside, other=0).to(tl.float32)
    tl.store(normal + at, deviation * inverse_std * weight + bias, mask=inside)


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
    """The gradients of z (which is x's, too), branch, scale and shift: see add_norm.

    Args:
        grad: gradient of LayerNorm(z).
        residual: gradient that reaches z by other ways, or None.
        branch: dtype of the branch's gradient; None: it is not needed.
    """
    _check(grad, z, residual, mask)
    rows, width = z.shape
    block = power_of_2(width)
    # Several rows at a time: a single row has too few loads in flight to saturate the memory.
    tile = max(1, min(16, TILE // block))
    programs = min(ceil_div(rows, tile), PROGRAMS)
    grad_z = torch.empty_like(z)
    grad_branch = None if branch is None else torch.empty_like(z, dtype=branch)
    parts = z.new_empty(programs, 2, width, dtype=torch.float32)
    _norm_backward[(programs,)](
        grad_z, grad_branch, parts, grad, z, mean, inverse, scale, residual, mask, factor, rows,
        width, programs, tile, block, **_options(tile * block),
    )  # fmt: skip
    grad_scale, grad_shift = parts.sum(0)
    return grad_z, grad_branch, grad_scale.to(scale.dtype), grad_shift.to(scale.dtype)


@triton.jit
def _norm_backward(
    grad_z, grad_branch, parts, grad, z, mean, inverse, scale, residual, mask, factor, rows, width,
    programs, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < width
    inverse_width = 1.0 / width
    weight = tl.load(scale + column, mask=real, other=0).to(tl.float32)
    grad_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    grad_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        at = row[:, None].to(tl.int64) * width + column[None, :]
        grad_normal = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        value = tl.load(z + at, mask=inside, other=0).to(tl.float32)
        row_mean = tl.load(mean + row, mask=row < rows, other=0)
        inverse_std = tl.load(inverse + row, mask=row < rows, other=0)
        x_hat = tl.where(inside, (value - row_mean[:, None]) * inverse_std[:, None], 0.0)
        grad_scale += grad_normal * x_hat
        grad_shift += grad_normal
        grad_x_hat = grad_normal * weight[None, :]
        mean_dx = tl.sum(grad_x_hat, 1) * inverse_width
        mean_dx_x = tl.sum(grad_x_hat * x_hat, 1) * inverse_width
        dz = (grad_x_hat - mean_dx[:, None] - x_hat * mean_dx_x[:, None]) * inverse_std[:, None]
        if residual is not None:
            dz += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        tl.store(grad_z + at, dz, mask=inside)
        if grad_branch is not None:
            if mask is not None:
                kept = tl.load(mask + at, mask=inside, other=0) != 0
                dz = tl.where(kept, dz * factor, 0.0)
            tl.store(grad_branch + at, dz, mask=inside)
    at = parts + first * 2 * width + column
    tl.store(at, tl.sum(grad_scale, 0), mask=real)
    tl.store(at + width, tl.sum(grad_shift, 0), mask=real)


# ---- cross-entropy, in one pass over the logits --------------------------------------------------


def mixed_cross_entropy(
    logits: Tensor, targets: Tensor, partners: Tensor, lam: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Losses (n,), float32, and their gradients with respect to the logits, in the logits' dtype.

    Args:
        logits: (n, classes).
        targets, partners: (n,) int64; one outside 0 to classes - 1 makes the loss NaN.
        lam: (n,).
        smoothing: 0 to 1.
    """
    if not logits.is_contiguous():
        raise ValueError("the kernel takes contiguous logits")
    n, classes = logits.shape
    losses, gradient = logits.new_empty(n, dtype=torch.float32), torch.empty_like(logits)
    block = power_of_2(classes)
    _mixed_cross_entropy[(n,)](
        losses, gradient, logits, targets.contiguous(), partners.contiguous(), lam.contiguous(),
        smoothing, classes, block, **_options(block),
    )  # fmt: skip
    return losses, gradient


@triton.jit
def _mixed_cross_entropy(
    losses, gradient, logits, targets, partners, lam, smoothing, classes, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < classes
    target, partner = tl.load(targets + row), tl.load(partners + row)
    own = tl.load(lam + row).to(tl.float32)
    x = tl.load(logits + row * classes + column, mask=inside, other=-float("inf")).to(tl.float32)
    largest = tl.max(x)
    exponential = tl.exp(x - largest)
    total = tl.sum(exponential)
    log_p = x - largest - tl.log(total)
    q = tl.where(column == target, own, 0.0) + tl.where(column == partner, 1 - own, 0.0)
    q = q * (1 - smoothing) + smoothing / classes
    # A class with p = 0 (its logit is minus infinity) and q = 0 adds 0, not NaN.
    loss = -tl.sum(q * tl.where(inside & (q != 0), log_p, 0.0))
    valid = (target >= 0) & (target < classes) & (partner >= 0) & (partner < classes)
    tl.store(losses + row, tl.where(valid, loss, float("nan")))
    tl.store(gradient + row * classes + column, exponential / total - q, mask=inside)
