"""How far ONNX Runtime's gradients are from PyTorch's."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# ONNX Runtime's error against float64 may be RATIO times PyTorch's, plus NOISE.
RATIO, NOISE = 10, 1e-4
# A gradient that is this small beside the whole one is rounding noise, such as that of a bias
# before a BatchNorm; its error counts relative to this fraction of the whole gradient.
FLOOR = 1e-3
TINY = 1e-30  # in place of a gradient of 0


class Step(NamedTuple):
    """What one forward and backward pass gives."""

    gradients: list[Tensor]
    buffers: list[Tensor]  # those of floating point, after it


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, changed in place: all modules but BatchNorms as in evaluation, so that nothing is
    random."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            module.training = False
    return model


def one_step(call: Callable[..., Tensor], model: nn.Module, arguments: Sequence[Tensor]) -> Step:
    """The gradients of the cross-entropy with made-up targets.

    Args:
        call: arguments -> logits (n, classes), with the parameters and buffers of `model`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logits = call(*arguments)
    targets = torch.arange(len(logits)) % logits.shape[1]
    found = torch.autograd.grad(F.cross_entropy(logits, targets), trained, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
    return Step(found, [b for b in model.buffers() if b.is_floating_point()])


def in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def errors_of_step(found: Step, expected: Step) -> tuple[float, float]:
    """The `relative_difference` of gradients, and that of buffers."""
    return (
        relative_difference(found.gradients, expected.gradients),
        relative_difference(found.buffers, expected.buffers),
    )


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """max_i |found_i - expected_i| / max(|expected_i|, FLOOR |expected|), in L2 norms of tensors
    and of all of them together; infinite if anything is not finite."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    sizes = [b.norm().item() for _, b in pairs]
    least = max(FLOOR * math.hypot(*sizes), TINY)
    ratios = [
        (a - b).norm().item() / max(size, least) for (a, b), size in zip(pairs, sizes, strict=True)
    ]
    return max(ratios, default=0.0) if all(map(math.isfinite, ratios)) else math.inf
