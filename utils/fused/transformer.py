"""Fused Transformer layers, but for attention: less memory traffic, fewer saved activations.

    norm_linear   LayerNorm(x) W' + b
    feed_forward  z + dropout(dropout(gelu(LayerNorm(z) W1' + b1)) W2' + b2),
                  z = x + dropout(branch)

A dropout mask takes one byte per element. The backward pass needs the outputs of LayerNorm and of
GELU with dropout: the mode "speed" saves them, "memory" recomputes them from their inputs, which
are saved in either mode. Under autocast, matrix products run in its dtype and the rest in the dtype
of its input, as in the plain modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import refuse_second_derivative
from .cast import autocast_together
from .dropout import Mask, draw_masks
from .elementwise import (
    LayerNormParameters,
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
    settings = _product_dtype(x), layer.eps, mode == "memory"
    with torch.autocast(x.device.type, enabled=False):
        return _NormLinear.apply(*settings, x, layer.weight, layer.bias, weight, bias)


def feed_forward(
    x: Tensor,
    branch: Tensor,
    layer: nn.LayerNorm,
    fc1: nn.Linear,
    fc2: nn.Linear,
    rate: float,
    mode: str = "memory",
) -> Tensor:
    """x and branch (rows, width) -> (rows, width); the formula is at the head of the file."""
    weights = autocast_together(fc1, fc2)
    settings = _product_dtype(x), layer.eps, mode == "memory"
    with torch.autocast(x.device.type, enabled=False):
        return _FeedForward.apply(*settings, rate, x, branch, layer.weight, layer.bias, *weights)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    half = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if half else x.dtype


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, weight and bias."""
    grad_weight, grad_bias = (grad.t() @ x).to(weight.dtype), grad.sum(0).to(bias.dtype)
    return grad @ weight.to(grad.dtype), grad_weight, grad_bias


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, eps: float, recompute: bool, x, scale, shift, weight, bias):
        layer = LayerNormParameters(scale, shift, eps)
        normal, mean, inverse = norm(x, layer, dtype)
        ctx.dtype, ctx.eps = dtype, eps
        saved = None if recompute else normal
        ctx.save_for_backward(x, saved, mean, inverse, scale, shift, weight, bias)
        return _linear(normal, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        x, normal, mean, inverse, scale, shift, weight, bias = ctx.saved_tensors
        layer = LayerNormParameters(scale, shift, ctx.eps)
        if normal is None:
            normal = norm(x, layer, ctx.dtype)[0]
        grad_normal, *linear_grads = _linear_backward(grad, normal, weight, bias)
        needed = ctx.needs_input_grad[3:6]
        norm_grads = norm_backward(grad_normal, x, mean, inverse, layer, needed)
        return None, None, None, *norm_grads, *linear_grads


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, dtype, eps: float, recompute: bool, rate: float, x, branch,
        scale, shift, w1, b1, w2, b2,
    ):  # fmt: skip
        branch_mask, hidden_mask, y_mask = draw_masks(branch, rate, (*w2.shape, len(w2)))
        layer = LayerNormParameters(scale, shift, eps)
        z, normal, mean, inverse = add_norm(x, branch, branch_mask, layer, dtype)
        hidden = _linear(normal, w1, b1)  # (rows, ffn)
        activated = gelu_dropped(hidden, hidden_mask)
        y = _linear(activated, w2, b2)
        ctx.dtype, ctx.branch_dtype, ctx.eps = dtype, branch.dtype, eps
        ctx.factor = hidden_mask.factor
        recomputed = (None, None) if recompute else (normal, activated)
        masks = branch_mask.kept, hidden_mask.kept, y_mask.kept
        parameters = scale, shift, w1, b1, w2, b2
        ctx.save_for_backward(z, mean, inverse, hidden, *recomputed, *masks, *parameters)
        return add_dropped(z, y, y_mask)

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        z, mean, inverse, hidden, normal, activated, *saved = ctx.saved_tensors
        branch_mask, hidden_mask, y_mask = (Mask(kept, ctx.factor) for kept in saved[:3])
        scale, shift, w1, b1, w2, b2 = saved[3:]
        layer = LayerNormParameters(scale, shift, ctx.eps)
        if activated is None:
            activated = gelu_dropped(hidden, hidden_mask)
        grad_y = dropped(grad, y_mask, ctx.dtype)
        grad_activated, *fc2_grads = _linear_backward(grad_y, activated, w2, b2)
        del activated
        grad_hidden = gelu_dropped_backward(grad_activated, hidden, hidden_mask)
        if normal is None:
            normal = norm(z, layer, ctx.dtype)[0]
        grad_normal, *fc1_grads = _linear_backward(grad_hidden, normal, w1, b1)
        needs = ctx.needs_input_grad
        needed = needs[4] or needs[5], *needs[6:8]
        grad_z, grad_scale, grad_shift, grad_branch = add_norm_backward(
            grad_normal, z, mean, inverse, layer, needed, grad, branch_mask, ctx.branch_dtype
        )
        norm_grads = grad_scale, grad_shift
        return None, None, None, None, grad_z, grad_branch, *norm_grads, *fc1_grads, *fc2_grads
