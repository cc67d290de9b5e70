"""The operations between a Transformer's matrix products: dropout, GELU, residual, LayerNorm.

Each uses its Triton kernel where that is available, else PyTorch. The formulas are in
utils/fused/kernels/layer_kernels.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .dropout import Mask

aten = torch.ops.aten


class LayerNormParameters(NamedTuple):
    """Weight and bias are (width,)."""

    weight: Tensor
    bias: Tensor
    eps: float


def dropped(x: Tensor, mask: Mask, dtype: torch.dtype | None = None) -> Tensor:
    """Applies the mask to x, or to the gradient of its result: x times the factor where kept, else
    0. In `dtype`; None: x's."""
    dtype = dtype or x.dtype
    kernel = None if mask.kept is None else kernels.layers(x)
    if kernel is not None:
        return kernel.add_dropped(None, x, *mask, dtype)
    x = x.to(dtype)
    return x if mask.kept is None else mask.kept.to(x.dtype).mul_(mask.factor).mul_(x)


def add_dropped(x: Tensor, branch: Tensor, mask: Mask) -> Tensor:
    """x + dropped(branch)."""
    kernel = _kernel_for_sum(x, branch)
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
    """The gradient of x, from the gradient of gelu_dropped(x)."""
    kernel = kernels.layers(grad, x)
    if kernel is not None:
        return kernel.gelu_dropped_backward(grad, x, *mask)
    return aten.gelu_backward(dropped(grad, mask), x)


def norm(
    x: Tensor, layer: LayerNormParameters, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm(x) in `dtype`, (rows, width), and each row's mean and 1 / sqrt(variance + eps),
    (rows, 1)."""
    kernel = kernels.layers(x)
    if kernel is not None:
        return kernel.add_norm(x, None, None, 1.0, *layer, dtype)[1:]
    weight, bias, eps = layer
    normal, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normal.to(dtype), mean, inverse


def add_norm(
    x: Tensor, branch: Tensor, mask: Mask, layer: LayerNormParameters, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z = x + dropped(branch), then the three results of norm(z)."""
    kernel = _kernel_for_sum(x, branch)
    if kernel is not None:
        return kernel.add_norm(x, branch, *mask, *layer, dtype)
    z = x + dropped(branch, mask)
    return z, *norm(z, layer, dtype)


def norm_backward(
    grad: Tensor,
    z: Tensor,
    mean: Tensor,
    inverse: Tensor,
    layer: LayerNormParameters,
    needed: tuple[bool, bool, bool],
    residual: Tensor | None = None,
) -> tuple:
    """Gradients of z, weight and bias, None where not needed, from the gradient of norm(z).
    `residual` is added to the gradient of z."""
    kernel = kernels.layers(grad, z, *([] if residual is None else [residual]))
    if kernel is not None:
        grad_z, _, *affine = kernel.norm_backward(
            grad, z, mean, inverse, layer.weight, residual, None, None, 1.0
        )
        gradients = grad_z, *affine
        return tuple(g if need else None for g, need in zip(gradients, needed, strict=True))
    grad = grad.to(z.dtype)
    grad_z, grad_weight, grad_bias = aten.native_layer_norm_backward(
        grad, z, z.shape[-1:], mean, inverse, layer.weight, layer.bias, list(needed)
    )
    if needed[0] and residual is not None:
        grad_z = residual + grad_z
    return grad_z, grad_weight, grad_bias


def add_norm_backward(
    grad: Tensor,
    z: Tensor,
    mean: Tensor,
    inverse: Tensor,
    layer: LayerNormParameters,
    needed: tuple[bool, bool, bool],
    residual: Tensor,
    mask: Mask,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """The results of norm_backward, then the gradient of the branch in `dtype`: see add_norm."""
    kernel = kernels.layers(grad, z, residual)
    if kernel is not None and all(needed):
        grad_z, grad_branch, *affine = kernel.norm_backward(
            grad, z, mean, inverse, layer.weight, residual, dtype, *mask
        )
        return grad_z, *affine, grad_branch
    gradients = norm_backward(grad, z, mean, inverse, layer, (True, *needed[1:]), residual)
    return *gradients, dropped(gradients[0], mask, dtype)


def _kernel_for_sum(x: Tensor, branch: Tensor):
    """The kernels write x + branch in x's dtype, so they are used only where PyTorch would, too."""
    widened = torch.promote_types(x.dtype, branch.dtype) != x.dtype
    return None if widened else kernels.layers(x, branch)
