"""The layers of a Transformer around attention, that keep less than the plain ones.

    norm_linear      LayerNorm(x) W' + b
    add_dropped      x + dropout(branch)
    feed_forward     x + dropout(dropout(gelu(LayerNorm(x) W1' + b1)) W2' + b2)

What LayerNorm, GELU and dropout make is made again in the backward pass: kept are their inputs, and
of dropout a byte for each element. Under autocast products are in its precision and the rest is
as it is, as with the plain modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.dropout import draw_mask, dropped

aten = torch.ops.aten


def norm_linear(norm: nn.LayerNorm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear(norm(x), weight, bias): (rows, width) -> (rows, outputs)."""
    dtype = _product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return _NormLinear.apply(dtype, norm.eps, x, norm.weight, norm.bias, weight, bias)


def add_dropped(x: Tensor, branch: Tensor, rate: float) -> Tensor:
    """x + dropout(branch), of one shape."""
    if not rate:
        return x + branch
    return _AddDropped.apply(x, branch, *draw_mask(branch, rate))


def feed_forward(
    x: Tensor, norm: nn.LayerNorm, fc1: nn.Linear, fc2: nn.Linear, rate: float
) -> Tensor:
    """(rows, width) -> the same."""
    tensors = norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias
    dtype = _product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return _FeedForward.apply(dtype, norm.eps, rate, x, *tensors)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    half = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if half else x.dtype


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # `once_differentiable` would leave parts out unsaid
        raise RuntimeError("fused layers have no second derivative: take --fused none")


def _norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm(x), and the mean and 1 / sqrt(variance + eps) of each row."""
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def _norm_backward(grad: Tensor, x: Tensor, mean, inverse, weight, bias, needed) -> tuple:
    grad = grad.to(x.dtype)
    return aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], mean, inverse, weight, bias, list(needed)
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, weight and bias."""
    of_weight, of_bias = (grad.t() @ x).to(weight.dtype), grad.sum(0).to(bias.dtype)
    return grad @ weight.to(grad.dtype), of_weight, of_bias


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, eps: float, x, scale, shift, weight, bias):
        normal, mean, inverse = _norm(x, scale, shift, eps)
        ctx.dtype, ctx.eps = dtype, eps
        ctx.save_for_backward(x, mean, inverse, scale, shift, weight, bias)
        return _linear(normal.to(dtype), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        x, mean, inverse, scale, shift, weight, bias = ctx.saved_tensors
        normal = _norm(x, scale, shift, ctx.eps)[0].to(ctx.dtype)
        of_normal, *of_linear = _linear_backward(grad, normal, weight, bias)
        needed = ctx.needs_input_grad[2:5]
        of_norm = _norm_backward(of_normal, x, mean, inverse, scale, shift, needed)
        return None, None, *of_norm, *of_linear


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, mask, factor: float):
        ctx.save_for_backward(mask)
        ctx.factor, ctx.dtype = factor, branch.dtype
        return x + dropped(branch, mask, factor)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        (mask,) = ctx.saved_tensors
        return grad, dropped(grad.to(ctx.dtype), mask, ctx.factor), None, None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, eps: float, rate: float, x, scale, shift, w1, b1, w2, b2):
        normal, mean, inverse = _norm(x, scale, shift, eps)
        hidden = _linear(normal.to(dtype), w1, b1)  # (rows, ffn)
        del normal
        inner, factor = draw_mask(hidden, rate)
        y = _linear(dropped(F.gelu(hidden), inner, factor), w2, b2)
        outer, _ = draw_mask(y, rate)
        ctx.dtype, ctx.eps, ctx.factor = dtype, eps, factor
        ctx.save_for_backward(x, mean, inverse, hidden, inner, outer, scale, shift, w1, b1, w2, b2)
        return x + dropped(y, outer, factor)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        x, mean, inverse, hidden, inner, outer, scale, shift, w1, b1, w2, b2 = ctx.saved_tensors
        of_y = dropped(grad.to(ctx.dtype), outer, ctx.factor)
        gated = dropped(F.gelu(hidden), inner, ctx.factor)
        of_gated, *of_second = _linear_backward(of_y, gated, w2, b2)
        del gated
        of_hidden = aten.gelu_backward(dropped(of_gated, inner, ctx.factor), hidden)
        normal = _norm(x, scale, shift, ctx.eps)[0].to(ctx.dtype)
        of_normal, *of_first = _linear_backward(of_hidden, normal, w1, b1)
        needed = ctx.needs_input_grad[3:6]
        of_x, *of_norm = _norm_backward(of_normal, x, mean, inverse, scale, shift, needed)
        of_x = grad + of_x if needed[0] else None
        return None, None, None, of_x, *of_norm, *of_first, *of_second
