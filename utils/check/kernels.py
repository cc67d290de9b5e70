"""Whether the fused modules give what the plain ones do, on this device."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from utils.fused import kernels
from utils.fused.batch_norm import normalization
from utils.fused.cross_entropy import fused_cross_entropy
from utils.fused.transformer import feed_forward
from utils.training.objective import mixed_cross_entropy

ALLOWED = 1e-4  # of the largest value, in float32: far more than rounding, far less than a mistake


def largest_differences(device: torch.device) -> dict[str, float]:
    """{fused module: largest difference from the plain one in float64, relative to the largest
    value}, of results and gradients."""
    comparisons = {
        "cross-entropy": _cross_entropy,
        "feed-forward block": _feed_forward,
        "BatchNorm": _batch_norm,
    }
    return {name: compare(device) for name, compare in comparisons.items()}


def how_computed(device: torch.device) -> str:
    """What the fused modules compute with on this device."""
    if device.type != "cuda":
        return "by PyTorch's operations, as the kernels are for NVIDIA GPUs"
    reason = kernels.unusable()
    return "by Triton's kernels" if reason is None else f"without kernels: {reason}"


def _difference(fused: Callable, plain: Callable, inputs: list[torch.Tensor]) -> float:
    """Of results, and of the gradients of all inputs; fused in float32, plain in float64."""
    found = []
    for function, dtype in ((fused, torch.float32), (plain, torch.float64)):
        tensors = [t.detach().to(dtype).requires_grad_() for t in inputs]
        result = function(*tensors)
        weights = torch.linspace(-1, 1, result.numel(), device=result.device, dtype=dtype)
        gradients = torch.autograd.grad((result.flatten() * weights).sum(), tensors)
        found.append([result.detach(), *gradients])
    pairs = zip(*found, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def _randn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _cross_entropy(device: torch.device) -> float:
    targets = torch.arange(64, device=device) % 10
    lam = torch.linspace(0, 1, 64, device=device)

    def loss(function: Callable, logits: torch.Tensor) -> torch.Tensor:
        return function(logits, targets, targets.flip(0), lam.to(logits.dtype), 0.1)

    return _difference(
        lambda logits: loss(fused_cross_entropy, logits),
        lambda logits: loss(mixed_cross_entropy, logits),
        [_randn(device, 64, 10)],
    )


def _feed_forward(device: torch.device) -> float:
    """z + W2 gelu(W1 LayerNorm(z)), z = x + branch."""
    shapes = ((48, 32), (48, 32), (32,), (32,), (128, 32), (128,), (32, 128), (32,))

    def fused(x, branch, *parameters):
        layer, fc1, fc2 = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        places = [(m, n) for m in (layer, fc1, fc2) for n in ("weight", "bias")]
        for (module, name), parameter in zip(places, parameters, strict=True):
            del module._parameters[name]
            setattr(module, name, parameter)  # so that it gets the gradient
        return feed_forward(x, branch, layer, fc1, fc2, 0.0, "speed")

    def plain(x, branch, weight, bias, weight1, bias1, weight2, bias2):
        z = x + branch
        hidden = F.gelu(F.linear(F.layer_norm(z, (32,), weight, bias), weight1, bias1))
        return z + F.linear(hidden, weight2, bias2)

    return _difference(fused, plain, [_randn(device, *shape) for shape in shapes])


def _batch_norm(device: torch.device) -> float:
    """Scale and shift from the statistics of a batch; they have no gradient of their own."""
    c = _randn(device, 8, 16, 6, 6).to(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(16).to(device)
    with torch.no_grad():
        _, scale, shift = normalization(norm, c)
        found = c * scale[:, None, None] + shift[:, None, None]
        exact = F.batch_norm(c.double(), None, None, training=True, eps=norm.eps)
    return float((found.double() - exact).abs().max() / exact.abs().max())
