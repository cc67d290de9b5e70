"""Modules that move fewer bytes and keep fewer activations than the plain ones, which stand in
utils/models.

A model has the same modules, parameters and names either way: `fuse` sets the attribute `fused` of
those that know of it, and their forward then goes the other way.

What is fused has no second derivative. So a model that is called with other weights than its own
(torch.func.functional_call), as meta-mixup's virtual steps do, is computed plainly.
"""

import torch
from torch import nn

MODES = ("none", "memory", "speed")


def fuse(model: nn.Module, mode: str) -> nn.Module:
    """The same model, fused as `mode` says: "none"; "memory": it keeps of the forward pass what
    cannot be made again cheaply, and makes the rest again in the backward pass; or "speed": it
    makes nothing twice.

    Raises:
        ValueError: no module of it can be fused.
    """
    if mode not in MODES:
        raise ValueError(f"mode is one of {MODES}, not {mode!r}")
    fusible = [module for module in model.modules() if hasattr(type(module), "fused")]
    if mode != "none" and not fusible:
        raise ValueError(f"no module of {type(model).__name__} can be fused")
    for module in fusible:
        module.fused = mode
    return model


def is_fused(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether this call of a module is a fused one; `parameter` is one of its own.

    Without gradients nothing is kept anyway, and a compiler decides for itself what it keeps.
    """
    return (
        module.fused != "none"
        and torch.is_grad_enabled()
        and isinstance(parameter, nn.Parameter)
        and not torch.compiler.is_compiling()
    )
