"""Casts of several tensors by one kernel: autocast takes one for each weight and each gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def cast_together(tensors: Sequence, dtypes: Sequence[torch.dtype]) -> list:
    """Each tensor in its dtype, for a GPU by one operation; None stays."""
    cast = [
        t if t is None or t.dtype == dtype else torch.empty_like(t, dtype=dtype)
        for t, dtype in zip(tensors, dtypes, strict=True)
    ]
    changed = [(to, t) for to, t in zip(cast, tensors, strict=True) if to is not t]
    if changed:
        torch._foreach_copy_(*map(list, zip(*changed, strict=True)))
    return cast


def autocast_together(*layers: nn.Linear) -> tuple[Tensor, ...]:
    """Weight and bias of each layer as autocast casts them for a product."""
    tensors = tuple(tensor for layer in layers for tensor in (layer.weight, layer.bias))
    device, dtype = tensors[0].device.type, tensors[0].dtype
    casts = torch.is_autocast_enabled(device) and not torch.compiler.is_compiling()
    if not casts or dtype != torch.float32:
        return tensors
    return _Cast.apply(torch.get_autocast_dtype(device), *tensors)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return tuple(cast_together(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, *_Cast.apply(ctx.dtype, *grads)
