"""Modules that are computed in float32 while the rest of the model is in half precision
(--keep_fp32)."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import UserError
from .objective import in_float32


class InFloat32:
    """Base of the classes that `keep_in_float32` gives to modules."""


def names_of_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the modules that the patterns name, in which * stands for any characters.

    Raises:
        UserError: a pattern names none.
    """
    known = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = fnmatch.filter(known, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5) or known[:3]
            raise UserError(
                f"--keep_fp32 {pattern}: the model has no such module; it has, for example, "
                f"{', '.join(near)}"
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def keep_in_float32(model: nn.Module, names: Sequence[str], device: torch.device) -> None:
    """Lets these modules compute in float32 under autocast, with their parts: inputs in half
    precision are converted, and autocast is off. Modules stay the same objects, under the same
    names; those that are kept already stay as they are."""
    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, InFloat32):
            module.__class__ = _in_float32(type(module), device.type)  # type: ignore[arg-type]  # hashable


def refuse_uncalled(model: nn.Module, names: Sequence[str], forward: Callable[[], object]) -> None:
    """UserError if the forward pass calls neither one of these modules nor a module around it that
    is among them, but for example reads its weights: it could not be kept in float32."""
    called = set()
    modules = {name: model.get_submodule(name) for name in names}
    handles = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: called.add(name))
        for name, module in modules.items()
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    for name in names:
        parts = name.split(".")
        if not any(".".join(parts[:count]) in called for count in range(1, len(parts) + 1)):
            raise UserError(
                f"--keep_fp32 {name}: the model reads the parts or weights of this module without "
                "calling it, so it cannot be kept in float32: name the module around it, or its "
                "parts"
            )


@functools.cache
def _in_float32(cls: type[nn.Module], device: str) -> type[nn.Module]:
    class Kept(InFloat32, cls):
        def forward(self, *args, **kwargs):
            args, kwargs = tree_map_only(Tensor, in_float32, (args, kwargs))
            with torch.autocast(device, enabled=False):
                return super().forward(*args, **kwargs)

    # For messages, and for what depends on whose class it is.
    Kept.__name__, Kept.__qualname__ = cls.__name__, cls.__qualname__
    Kept.__module__ = cls.__module__
    return Kept
