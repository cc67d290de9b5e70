"""BatchNorm with the statistics of all ranks' samples.

Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
covariate shift" (2015), arXiv:1502.03167. PyTorch's own SyncBatchNorm computes on GPUs alone; on
a CPU the one here does, with one collective forward and one backward.

With x^ = (x - mean) / sqrt(var + eps) over the N values of a channel that all ranks have, and
y = weight x^ + bias,

    dx = weight / sqrt(var + eps) (dy - sum(dy) / N - x^ sum(dy x^) / N),

where the sums go over all ranks. Those that are the gradients of weight and bias are each rank's
own: they are added up with the gradients of all other parameters.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.exchange import Exchange
from utils.fused.batch_norm import Statistics, global_backward, tracked_statistics


def sync_batch_norms(model: nn.Module, exchange: Exchange) -> nn.Module:
    """The model with every BatchNorm over all ranks. Its parameters and buffers are the same
    tensors as before under the same names; the model itself is changed, and is another object
    only if it is a BatchNorm.

    Raises:
        ValueError: a BatchNorm1d or 3d on a device that is no GPU.
    """
    if exchange.size == 1:
        return model
    if next(model.parameters()).device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, getattr(exchange, "group", None))
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.exchange = exchange  # for what is fused
        return model
    if isinstance(model, _BatchNorm):
        return _converted(model, exchange)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, _converted(child, exchange))
    return model


def _converted(module: _BatchNorm, exchange: Exchange) -> nn.Module:
    if not isinstance(module, nn.BatchNorm2d):
        raise ValueError(f"on a CPU BatchNorm2d alone goes over all ranks, no {module}")
    new = SyncBatchNorm2d(
        module.num_features, module.eps, module.momentum, module.affine,
        module.track_running_stats, device="meta", exchange=exchange,
    )  # fmt: skip
    new._parameters, new._buffers = module._parameters, module._buffers
    new.training = module.training
    return new


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Args: those of nn.BatchNorm2d, and
    exchange: with the ranks that have the other samples; all of them call it alike. A rank may
        have no sample, but all together have two values of a channel.
    """

    def __init__(
        self, num_features: int, *args, exchange: Exchange | None = None, **options
    ) -> None:
        super().__init__(num_features, *args, **options)
        self.exchange = exchange or Exchange()

    def forward(self, input: Tensor) -> Tensor:
        """(n, channels, height, width) -> the same."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        return _uncompiled()(self, input)

    def _normalize(self, input: Tensor) -> Tensor:
        mean, var, count = tracked_statistics(self, input.detach(), self.exchange)
        return _Normalize.apply(
            input, self.weight, self.bias, mean, var, self.eps, count, self.exchange
        )


@functools.cache  # PyTorch's compiler, which takes seconds to be imported, is so when it is needed
def _uncompiled():
    """What the ranks tell each other is not compiled."""
    return torch.compiler.disable(SyncBatchNorm2d._normalize)


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
