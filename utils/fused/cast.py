"""Casts of several tensors by one kernel: autocast takes one for each weight, and one for the
gradient of each."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def cast_together(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Each in its dtype; for a GPU one operation."""
    cast = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(cast, tensors)
    return cast


def autocast_together(*weights: Tensor) -> tuple[Tensor, ...]:
    """The weights as autocast casts them for matrix products."""
    device = weights[0].device.type
    if (
        not torch.is_autocast_enabled(device)
        or any(weight.dtype != torch.float32 for weight in weights)
        or torch.compiler.is_compiling()
    ):
        return weights
    return _Cast.apply(torch.get_autocast_dtype(device), *weights)


class _Cast(torch.autograd.Function):
    """(dtype, tensors of one dtype) -> the tensors in `dtype`."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        cast = cast_together(tensors, [dtype] * len(tensors))
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(t for t, n in zip(cast, needed, strict=True) if not n))
        return tuple(cast)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        given = [grad for grad in grads if grad is not None]
        cast = iter(_Cast.apply(ctx.dtype, *given) if given else ())
        return None, *(None if grad is None else next(cast) for grad in grads)
