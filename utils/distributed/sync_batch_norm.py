"""BatchNorm with the statistics of all ranks' samples.

Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
covariate shift" (2015), arXiv:1502.03167. One collective forward, one backward, on CPUs and GPUs.
PyTorch's own SyncBatchNorm computes on GPUs alone, where its host waits three times in each layer
for the device, and where in half precision a rank without samples sends another dtype than the
others.

With x^ = (x - mean) / sqrt(var + eps) over the N values of a channel that all ranks have, and
y = weight x^ + bias,

    dx = weight / sqrt(var + eps) (dy - sum(dy) / N - x^ sum(dy x^) / N),

where the sums go over all ranks. Those that are the gradients of weight and bias are each rank's
own: they are added up with the gradients of all other parameters.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UserError
from ..exchange import Exchange
from ..fused.batch_norm import Statistics, global_backward, tracked_statistics

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def sync_batch_norms(model: nn.Module, exchange: Exchange) -> None:
    """Changes every BatchNorm of the model to one over all ranks. A rank may have no sample, but
    all together have two values of a channel. All ranks call the model alike.

    Raises:
        UserError: the model has a BatchNorm whose forward pass is not known. Nothing is changed.
    """
    if exchange.size == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    classes = [_class_over_ranks(type(norm)) for norm in norms]  # type: ignore[arg-type]  # hashable
    for norm, over_ranks in zip(norms, classes, strict=True):
        norm.__class__, norm.exchange = over_ranks, exchange


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Within, every BatchNorm takes the statistics of this rank alone, without a collective."""
    norms = [module for module in model.modules() if isinstance(module, OverRanks)]
    exchanges = [norm.exchange for norm in norms]
    for norm in norms:
        norm.exchange = Exchange()
    try:
        yield
    finally:
        for norm, exchange in zip(norms, exchanges, strict=True):
            norm.exchange = exchange


@functools.cache
def _class_over_ranks(norm: type[_BatchNorm]) -> type[_BatchNorm]:
    if norm.forward in {plain.forward for plain in PLAIN}:
        mixin = OverRanks
    elif norm.__name__ == "BatchNormAct2d" and norm.__module__.startswith("timm."):
        mixin = ActivatedOverRanks
    else:
        raise UserError(
            f"--sync_bn: the model's {norm.__name__} is not PyTorch's BatchNorm and may compute "
            "something else; leave --sync_bn out"
        )
    return type(f"{norm.__name__}OverRanks", (mixin, norm), {})


class OverRanks:
    """What a class of BatchNorm derives from to have the statistics of all ranks in training.

    Attributes:
        exchange: with the ranks that have the other samples.
    """

    exchange: Exchange

    def forward(self, input: Tensor) -> Tensor:
        """(n, channels, ...) -> the same."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        return _uncompiled()(self, input)

    def _normalize(self, input: Tensor) -> Tensor:
        mean, var, count = tracked_statistics(self, input.detach(), self.exchange)
        return _Normalize.apply(
            input, self.weight, self.bias, mean, var, self.eps, count, self.exchange
        )


class ActivatedOverRanks(OverRanks):
    """The same for timm's BatchNorm with an activation."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)  # in evaluation timm's own, with the activation
        return self.act(self.drop(output)) if self.training else output


@functools.cache  # PyTorch's compiler, which takes seconds to be imported, is so when it is needed
def _uncompiled():
    """What the ranks tell each other is not compiled."""
    return torch.compiler.disable(OverRanks._normalize)


class _Normalize(torch.autograd.Function):
    """The formulas at the head of the file; computes in float32 or, where given that, float64."""

    @staticmethod
    def forward(ctx, input, weight, bias, mean, var, eps, count, exchange):
        exact = torch.float64 if input.dtype == torch.float64 else torch.float32
        mean, scale = mean.to(exact), (var + eps).rsqrt().to(exact)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.exchange = exchange
        return F.batch_norm(input, mean, var.to(exact), weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # `once_differentiable` would leave parts out unsaid
            raise RuntimeError(
                "BatchNorm over all ranks has no second derivative: take no create_graph "
                "(--meta_exact) with --sync_bn"
            )
        input, weight, *statistics = ctx.saved_tensors
        found = global_backward(
            grad, input, weight, Statistics(*statistics), ctx.needs_input_grad, ctx.exchange
        )
        return *found, None, None, None, None, None
