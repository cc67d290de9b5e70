"""What stands between the products of a Transformer's layers, each by a kernel where there is one,
else by PyTorch. See utils/fused/kernels/layer_kernels.py for the formulas.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.fused import kernels
from utils.fused.dropout import draw_mask

aten = torch.ops.aten


class Mask(NamedTuple):
    """Of dropout (see dropout.py); without kept values nothing is dropped."""

    kept: Tensor | None
    factor: float

    @classmethod
    def draw(cls, x: Tensor, rate: float) -> "Mask":
        return cls(*draw_mask(x, rate))


class Norm(NamedTuple):
    """What LayerNorm multiplies by and adds, (width,)."""

    weight: Tensor
    bias: Tensor
    eps: float


def dropped(x: Tensor, mask: Mask) -> Tensor:
    """x, or its gradient, where it is kept, times the factor; else 0."""
    if mask.kept is None:
        return x
    kernel = kernels.layers(x)
    if kernel is not None:
        return kernel.add_dropped(None, x, *mask)
    return mask.kept.to(x.dtype).mul_(mask.factor).mul_(x)


def add_dropped(x: Tensor, branch: Tensor, mask: Mask) -> Tensor:
    """x + dropped(branch)."""
    kernel = _for_sum(x, branch)
    if kernel is not None:
        return kernel.add_dropped(x, branch, *mask)
    return x + dropped(branch, mask)


def gelu_dropped(x: Tensor, mask: Mask) -> Tensor:
    """dropped(gelu(x))."""
    kernel = kernels.layers(x)
    if kernel is not None:
        return kernel.gelu_dropped(x, *mask)
    return dropped(F.gelu(x), mask)


def gelu_dropped_backward(grad: Tensor, x: Tensor, mask: Mask) -> Tensor:
    """The gradient of x from that of gelu_dropped(x)."""
    kernel = kernels.layers(grad, x)
    if kernel is not None:
        return kernel.gelu_dropped_backward(grad, x, *mask)
    return aten.gelu_backward(dropped(grad, mask), x)


def norm(x: Tensor, numbers: Norm, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm(x) of `dtype`, (rows, width) -> the same; mean and 1 / sqrt(variance + eps) of each
    row, (rows, 1)."""
    kernel = kernels.layers(x)
    if kernel is not None:
        return kernel.add_norm(x, None, None, 1.0, *numbers, dtype)[1:]
    weight, bias, eps = numbers
    normal, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normal.to(dtype), mean, inverse


def add_norm(
    x: Tensor, branch: Tensor, mask: Mask, numbers: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z = x + dropped(branch), and norm(z)."""
    kernel = _for_sum(x, branch)
    if kernel is not None:
        return kernel.add_norm(x, branch, *mask, *numbers, dtype)
    z = x + dropped(branch, mask)
    return z, *norm(z, numbers, dtype)


def norm_backward(
    grad: Tensor,
    z: Tensor,
    mean: Tensor,
    inverse: Tensor,
    numbers: Norm,
    needed: tuple[bool, bool, bool],
    residual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """From the gradient of norm(z): those of z, weight and bias, as they are needed. `residual` is
    added to that of z."""
    kernel = kernels.layers(grad, z, *([] if residual is None else [residual]))
    if kernel is not None:
        of_z, _, *rest = kernel.norm_backward(
            grad, z, mean, inverse, numbers.weight, residual, None, None, 1.0
        )
        found = of_z, *rest
        return tuple(part if want else None for part, want in zip(found, needed, strict=True))
    grad = grad.to(z.dtype)
    of_z, of_weight, of_bias = aten.native_layer_norm_backward(
        grad, z, z.shape[-1:], mean, inverse, numbers.weight, numbers.bias, list(needed)
    )
    if needed[0] and residual is not None:
        of_z = residual + of_z
    return of_z, of_weight, of_bias


def add_norm_backward(
    grad: Tensor,
    z: Tensor,
    mean: Tensor,
    inverse: Tensor,
    numbers: Norm,
    needed: tuple[bool, bool, bool],
    residual: Tensor,
    mask: Mask,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """norm_backward, and the gradient of the branch, of `dtype`, last."""
    kernel = kernels.layers(grad, z, residual)
    if kernel is not None and all(needed):
        of_z, of_branch, *rest = kernel.norm_backward(
            grad, z, mean, inverse, numbers.weight, residual, dtype, *mask
        )
        return of_z, *rest, of_branch
    found = norm_backward(grad, z, mean, inverse, numbers, (True, *needed[1:]), residual)
    return *found, dropped(found[0].to(dtype), mask)


def _for_sum(x: Tensor, branch: Tensor):
    """The kernels write the sum as x is."""
    widened = torch.promote_types(x.dtype, branch.dtype) != x.dtype
    return None if widened else kernels.layers(x, branch)
