"""Fused versions of the modules in utils/models: less memory traffic, fewer saved activations.

Fusing changes no module, parameter or name: `fuse` sets the attribute `fused` of every module that
has it, and the module's forward then calls the fused function.

Fused functions have no second derivative. A model called with weights other than its own
(torch.func.functional_call), as in meta-mixup's virtual steps, therefore takes the plain path.
"""

import torch
from torch import nn

MODES = ("none", "memory", "speed")


def fuse(model: nn.Module, mode: str) -> nn.Module:
    """Switches the model to `mode` in place and returns it.

    "none": plain; "memory": activations that are cheap to recompute are recomputed in the backward
    pass; "speed": nothing is recomputed.

    Raises:
        ValueError: the mode is unknown, or the model has no module that can be fused.
    """
    if mode not in MODES:
        raise ValueError(f"mode is one of {MODES}, not {mode!r}")
    fusible = [module for module in model.modules() if hasattr(type(module), "fused")]
    if mode != "none" and not fusible:
        raise ValueError(f"no module of {type(model).__name__} can be fused")
    for module in fusible:
        module.fused = mode
    return model


def refuse_second_derivative() -> None:
    """To be called in the backward pass; `once_differentiable` would silently drop terms."""
    if torch.is_grad_enabled():
        raise RuntimeError("fused modules have no second derivative: use --fused none")


def is_fused(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether `module` takes its fused path; `parameter` is one of its parameters, as seen by the
    call.

    Without gradients no activation is saved anyway, and torch.compile decides for itself what to
    save.
    """
    return (
        module.fused != "none"
        and torch.is_grad_enabled()
        and isinstance(parameter, nn.Parameter)
        and not torch.compiler.is_compiling()
    )
