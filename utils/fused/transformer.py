"""The layers of a Transformer around attention, that move and keep less than the plain ones.

    norm_linear   LayerNorm(x) W' + b
    feed_forward  z + dropout(dropout(gelu(LayerNorm(z) W1' + b1)) W2' + b2),
                  z = x + dropout(branch)

Of dropout a byte is kept for each element. What LayerNorm and GELU with dropout make is needed
again by the backward pass: the mode "speed" keeps it, "memory" makes it again from their inputs,
which are kept in any case. Under autocast products are in its precision and the rest is as it is,
as with the plain modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.elementwise import (
    Mask,
    Norm,
    add_dropped,
    add_norm,
    add_norm_backward,
    dropped,
    gelu_dropped,
    gelu_dropped_backward,
    norm,
    norm_backward,
)


def norm_linear(
    layer: nn.LayerNorm, x: Tensor, weight: Tensor, bias: Tensor, mode: str = "memory"
) -> Tensor:
    """F.linear(layer(x), weight, bias): (rows, width) -> (rows, outputs)."""
    how = _product_dtype(x), layer.eps, mode == "memory"
    with torch.autocast(x.device.type, enabled=False):
        return _NormLinear.apply(*how, x, layer.weight, layer.bias, weight, bias)


def feed_forward(
    x: Tensor,
    branch: Tensor,
    layer: nn.LayerNorm,
    fc1: nn.Linear,
    fc2: nn.Linear,
    rate: float,
    mode: str = "memory",
) -> Tensor:
    """(rows, width), twice -> the same."""
    tensors = layer.weight, layer.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias
    how = _product_dtype(x), layer.eps, mode == "memory"
    with torch.autocast(x.device.type, enabled=False):
        return _FeedForward.apply(*how, rate, x, branch, *tensors)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    half = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if half else x.dtype


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # `once_differentiable` would leave parts out unsaid
        raise RuntimeError("fused layers have no second derivative: take --fused none")


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, weight and bias."""
    of_weight, of_bias = (grad.t() @ x).to(weight.dtype), grad.sum(0).to(bias.dtype)
    return grad @ weight.to(grad.dtype), of_weight, of_bias


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, eps: float, again: bool, x, scale, shift, weight, bias):
        normal, mean, inverse = norm(x, Norm(scale, shift, eps), dtype)
        ctx.dtype, ctx.eps = dtype, eps
        kept = None if again else normal
        ctx.save_for_backward(x, kept, mean, inverse, scale, shift, weight, bias)
        return _linear(normal, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        x, normal, mean, inverse, scale, shift, weight, bias = ctx.saved_tensors
        numbers = Norm(scale, shift, ctx.eps)
        if normal is None:
            normal = norm(x, numbers, ctx.dtype)[0]
        of_normal, *of_linear = _linear_backward(grad, normal, weight, bias)
        needed = ctx.needs_input_grad[3:6]
        of_norm = norm_backward(of_normal, x, mean, inverse, numbers, needed)
        return None, None, None, *of_norm, *of_linear


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, dtype, eps: float, again: bool, rate: float, x, branch,
        scale, shift, w1, b1, w2, b2,
    ):  # fmt: skip
        of_branch = Mask.draw(branch, rate)
        z, normal, mean, inverse = add_norm(x, branch, of_branch, Norm(scale, shift, eps), dtype)
        hidden = _linear(normal, w1, b1)  # (rows, ffn)
        inner = Mask.draw(hidden, rate)
        gated = gelu_dropped(hidden, inner)
        y = _linear(gated, w2, b2)
        outer = Mask.draw(y, rate)
        ctx.dtype, ctx.of_branch, ctx.eps, ctx.factor = dtype, branch.dtype, eps, inner.factor
        made = (None, None) if again else (normal, gated)
        masks = of_branch.kept, inner.kept, outer.kept
        ctx.save_for_backward(z, mean, inverse, hidden, *made, *masks, scale, shift, w1, b1, w2, b2)
        return add_dropped(z, y, outer)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        z, mean, inverse, hidden, normal, gated, *saved = ctx.saved_tensors
        of_branch, inner, outer = (Mask(kept, ctx.factor) for kept in saved[:3])
        scale, shift, w1, b1, w2, b2 = saved[3:]
        numbers = Norm(scale, shift, ctx.eps)
        if gated is None:
            gated = gelu_dropped(hidden, inner)
        of_y = dropped(grad.to(ctx.dtype), outer)
        of_gated, *of_second = _linear_backward(of_y, gated, w2, b2)
        del gated
        of_hidden = gelu_dropped_backward(of_gated, hidden, inner)
        if normal is None:
            normal = norm(z, numbers, ctx.dtype)[0]
        of_normal, *of_first = _linear_backward(of_hidden, normal, w1, b1)
        needs = ctx.needs_input_grad
        needed = needs[4] or needs[5], *needs[6:8]
        of_z, of_scale, of_shift, of_branch = add_norm_backward(
            of_normal, z, mean, inverse, numbers, needed, grad, of_branch, ctx.of_branch
        )
        return None, None, None, None, of_z, of_branch, of_scale, of_shift, *of_first, *of_second
