"""The parts of BatchNorm, so that its output can be recomputed from its input.

Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
covariate shift" (2015), arXiv:1502.03167. Given the statistics, BatchNorm is c scale + shift with
one scale and one shift per channel: besides its input c, only these need to be saved.

Results equal nn.BatchNorm2d's to the bit, or those of utils/distributed/sync_batch_norm.py where
statistics span all ranks. On a GPU, statistics of one process's batch come from Triton kernels,
which round less often.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange import Exchange
from . import kernels

aten = torch.ops.aten


class Statistics(NamedTuple):
    """Per channel, (channels,), in float32 or float64."""

    mean: Tensor
    inverse_std: Tensor  # 1 / sqrt(variance + eps); for running statistics the variance itself
    # (): values per channel over all ranks; None: this rank alone
    count: Tensor | None = None  # type: ignore[assignment]  # not tuple's method `count`


def uses_batch_statistics(norm: nn.Module) -> bool:
    """Whether `norm` normalises by the batch's statistics, not by the running ones."""
    return norm.training or norm.running_mean is None


def statistics_exchange(norm: nn.Module) -> Exchange | None:
    """The exchange over whose ranks a training BatchNorm computes its statistics; None: this rank
    alone."""
    exchange = getattr(norm, "exchange", None) if norm.training else None
    return exchange if exchange is not None and exchange.size > 1 else None


def normalization(norm: nn.Module, c: Tensor) -> tuple[Statistics, Tensor, Tensor]:
    """The statistics by which `norm` normalises c (n, channels, height, width), and scale and
    shift: BatchNorm(c) = c scale + shift. Updates the running statistics as `norm` would."""
    exchange = statistics_exchange(norm)
    kernel = kernels.images(c) if uses_batch_statistics(norm) and exchange is None else None
    if kernel is not None:
        mean, inverse_std, scale, shift = _values_by_kernel(kernel, norm, c)
        return Statistics(mean, inverse_std), scale, shift
    if not uses_batch_statistics(norm):
        statistics = Statistics(norm.running_mean.clone(), norm.running_var.clone())
        inverse = 1 / (statistics.inverse_std + norm.eps).sqrt()
    elif exchange is not None:
        statistics, inverse = _global_statistics(norm, c, exchange)
    else:
        statistics = _local_statistics(norm, c)
        inverse = statistics.inverse_std
    if norm.weight is None:
        return statistics, inverse, -statistics.mean * inverse
    scale = inverse * norm.weight
    return statistics, scale, torch.addcmul(norm.bias, statistics.mean, scale, value=-1)


def _values_by_kernel(kernel: ModuleType, norm: nn.Module, c: Tensor) -> tuple[Tensor, ...]:
    _refuse_one_value(c)
    mean, var, batches = norm.running_mean, norm.running_var, None
    if not (norm.training and norm.track_running_stats):
        mean = var = None
    if var is None or norm.momentum is None:
        momentum = _batch_momentum(norm)
    else:
        momentum, batches = norm.momentum, norm.num_batches_tracked
    return kernel.batch_values(c, norm.weight, norm.bias, norm.eps, mean, var, momentum, batches)


def _refuse_one_value(c: Tensor) -> None:
    if c.numel() // c.shape[1] < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got {c.shape}")


def _local_statistics(norm: nn.Module, c: Tensor) -> Statistics:
    _refuse_one_value(c)
    momentum, mean, var = _batch_momentum(norm), norm.running_mean, norm.running_var
    if not (norm.training and norm.track_running_stats):
        momentum, dtype = 0.0, c.dtype if c.dtype == torch.float64 else torch.float32
        mean = var = c.new_zeros(c.shape[1], dtype=dtype)
    mean, var = torch.batch_norm_update_stats(c, mean, var, momentum)
    # In float64, rounded once, as in PyTorch.
    return Statistics(mean, (var.double() + norm.eps).rsqrt().to(var.dtype))


def _batch_momentum(norm: nn.Module) -> float:
    """The batch's weight in the new running statistics. Counts the batch."""
    if not (norm.training and norm.track_running_stats):
        return 0.0
    norm.num_batches_tracked.add_(1)
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _global_statistics(norm: nn.Module, c: Tensor, exchange: Exchange) -> tuple[Statistics, Tensor]:
    """The statistics, and 1 / sqrt(variance + eps) of the rounded variance, by which the plain
    module scales."""
    mean, var, count = tracked_statistics(norm, c, exchange)
    dtype = torch.float64 if c.dtype == torch.float64 else torch.float32
    statistics = Statistics(mean.to(dtype), (var + norm.eps).rsqrt().to(dtype), count)
    return statistics, 1 / (var.to(dtype) + norm.eps).sqrt()


def tracked_statistics(
    norm: nn.Module, c: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """`global_statistics`, which the running statistics of `norm` follow, with the unbiased
    variance.

    Raises:
        ValueError: a channel has a single value. It is not checked on a GPU, where that would take
            a wait.
    """
    mean, var, count = global_statistics(c, exchange)
    if c.device.type == "cpu" and count < 2:
        raise ValueError(f"BatchNorm needs two values of a channel, and got {int(count)}")
    if norm.track_running_stats:
        momentum, unbiased = _batch_momentum(norm), var * (count / (count - 1))
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    return mean, var, count


def global_statistics(c: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all ranks, (channels,) each, and the number of
    values per channel, (); in float64.

    The variance within the ranks is added to the variance between their means: no difference of
    large numbers.
    """
    channels = c.shape[1]
    local = c.new_zeros(2 * channels + 1, dtype=torch.float64)
    local[0] = c.numel() // channels
    if c.numel():
        var, mean = torch.var_mean(at_least_float32(c), _all_but_channels(c), correction=0)
        local[1 : channels + 1], local[channels + 1 :] = mean, var
    gathered = torch.stack(exchange.gather(local))  # (ranks, 2 * channels + 1)
    count = gathered[:, :1]
    mean, var = gathered[:, 1 : channels + 1], gathered[:, channels + 1 :]
    total = count.sum()
    global_mean = (count * mean).sum(0) / total
    global_var = (count * (var + (mean - global_mean).square())).sum(0) / total
    return global_mean, global_var, total


def prefers_out_of_place(tensor: Tensor) -> bool:
    """Whether an operation is faster out of place than in place: on CPUs in half precision it is,
    in other dtypes it is not (torch 2.15)."""
    return tensor.device.type == "cpu" and tensor.dtype.itemsize == 2


def relu_backward(grad: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """The gradient of ReLU's input from the gradient of its output y; `out` may be either
    argument."""
    return aten.threshold_backward.grad_input(grad, y, 0, grad_input=out)


def add(tensor: Tensor, other: Tensor) -> Tensor:
    """tensor + other; may overwrite `tensor`."""
    return torch.add(tensor, other, out=None if prefers_out_of_place(tensor) else tensor)


class BatchNormOutput(NamedTuple):
    """relu((c scale + shift) path_mask / keep_rate + residual), recomputed from its inputs whenever
    it is needed. A BatchNormOutput used as `residual` has no ReLU of its own.
    """

    c: Tensor  # (n, channels, height, width)
    scale: Tensor  # (channels,)
    shift: Tensor
    path_mask: Tensor | None = None  # drop-path's, (n, 1, 1, 1)
    keep_rate: float = 1.0
    residual: "BatchNormOutput | Tensor | None" = None

    def compute_into(self, out: Tensor) -> Tensor:
        """Computes it into `out`, which has c's shape, dtype and strides."""
        if not out.numel():  # PyTorch's kernel for GPUs refuses an empty batch
            return out
        residual: Any = self.residual
        residual_affine: tuple = ()
        if isinstance(residual, BatchNormOutput):
            residual, residual_affine = residual.c, (residual.scale, residual.shift)
        kernel = kernels.images(self.c, *([] if residual is None else [residual]))
        if kernel is not None:
            args = self.c, self.scale, self.shift, True, self.path_mask, self.keep_rate, residual
            return kernel.affine(*args, *residual_affine, out=out)
        return torch.clamp_min(
            self._before_relu(None if prefers_out_of_place(out) else out), 0, out=out
        )

    def _before_relu(self, out: Tensor | None) -> Tensor:
        """In `out`; None: in new memory."""
        # BatchNorm with mean 0 and variance 1 takes one pass over c and rounds like the real one.
        ones, zeros = torch.ones_like(self.scale), torch.zeros_like(self.scale)
        args = self.scale, self.shift, zeros, ones, False, 0.0, 0.0
        if out is None:
            value = aten.native_batch_norm(self.c, *args)[0]
        else:
            unused = {"save_mean": ones.new_empty(0), "save_invstd": ones.new_empty(0)}
            value = aten.native_batch_norm.out(self.c, *args, out=out, **unused)[0]
        if self.path_mask is not None:
            value.mul_(self.path_mask).div_(self.keep_rate)
        residual = self.residual
        if residual is None:
            return value
        if isinstance(residual, BatchNormOutput):
            residual = residual._before_relu(None)
        return torch.add(value, residual, out=out)


class Gradients(NamedTuple):
    """Gradients of BatchNorm's input, weight and bias; None where not needed."""

    c: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class ReluBackward(NamedTuple):
    """What the backward pass needs of the ReLU that follows a BatchNorm."""

    y: Tensor  # the ReLU's output
    out: Tensor  # memory for the gradient of the ReLU's input
    only_norm: bool  # y = relu(BatchNorm(c)), and nothing else reads the gradient in `out`


def batch_norm_backward(
    grad: Tensor,
    output: BatchNormOutput,
    weight: Tensor | None,
    statistics: Statistics,
    norm: nn.Module,
    needed: tuple[bool, bool, bool],
    batch: bool,
    exchange: Exchange | None,
    relu: ReluBackward | None = None,
) -> Gradients:
    """The backward pass of BatchNorm and, where given, of the ReLU that follows it.

    Args:
        grad: gradient of BatchNorm's output, or of the ReLU's.
        output: BatchNorm's; its c is BatchNorm's input.
        statistics: those used in the forward pass; the batch's where `batch`, else the running
            ones.
        needed: which gradients are needed: of input, weight, bias.
        exchange: over whose ranks the statistics were computed; None: this rank alone.
    """
    needed = (needed[0], needed[1] and weight is not None, needed[2] and weight is not None)
    c = output.c
    kernel = kernels.images(c) if batch and exchange is None else None
    if kernel is not None:
        return _backward_by_kernel(kernel, grad, output, weight, statistics, needed, relu)
    if relu is not None:
        grad = relu_backward(grad, relu.y, relu.out)
    if exchange is not None:
        return global_backward(grad, c, weight, statistics, needed, exchange)
    mean, inverse_std, _ = statistics
    running = (None, None, mean, inverse_std) if batch else (mean, inverse_std, None, None)
    gradients = aten.native_batch_norm_backward(
        grad, c, weight, *running, batch, norm.eps, list(needed)
    )
    return Gradients(*(g if need else None for g, need in zip(gradients, needed, strict=True)))


def _backward_by_kernel(
    kernel: ModuleType,
    grad: Tensor,
    output: BatchNormOutput,
    weight: Tensor | None,
    statistics: Statistics,
    needed: tuple[bool, ...],
    relu: ReluBackward | None,
) -> Gradients:
    """In two passes, which include the ReLU's backward; the gradient of the ReLU's input is written
    only where something else reads it."""
    c = output.c
    values = kernel.ChannelValues(
        statistics.mean, statistics.inverse_std, output.scale, output.shift
    )
    grad = grad.contiguous(memory_format=torch.channels_last)
    only_norm = relu is not None and relu.only_norm
    if relu is None or only_norm:
        sums = kernel.gradient_sums(grad, c, values, relu=only_norm)
    else:
        sums = kernel.gradient_sums(grad, c, values, y=relu.y, relu_grad=relu.out)
        grad = relu.out
    grad_c = None
    if needed[0]:
        out = torch.empty_like(c)
        grad_c = kernel.input_gradient(grad, c, values, sums, relu=only_norm, out=out)
    grad_bias, grad_weight = sums if weight is None else sums.to(weight.dtype)
    return Gradients(grad_c, grad_weight if needed[1] else None, grad_bias if needed[2] else None)


def global_backward(grad, c, weight, statistics, needed, exchange) -> Gradients:
    """dc = weight inverse_std (dy - sum(dy) / N - x^ sum(dy x^) / N), x^ = (c - mean) inverse_std,
    for c (n, channels, ...).

    The sums are over all ranks, but the gradients of weight and bias are this rank's own."""
    mean, inverse_std, count = statistics
    x_hat = (at_least_float32(c) - _per_channel(mean, c)).mul_(_per_channel(inverse_std, c))
    grad, dims = at_least_float32(grad), _all_but_channels(c)
    sums = torch.stack([grad.sum(dims), (grad * x_hat).sum(dims)])
    grad_weight = grad_bias = grad_c = None
    if weight is not None:
        grad_bias, grad_weight = sums.to(weight.dtype)
    if needed[0]:
        mean_dy, mean_dy_x_hat = exchange.sum(sums) / count.to(sums.dtype)
        factor = inverse_std if weight is None else inverse_std * weight
        through_statistics = x_hat.mul_(_per_channel(mean_dy_x_hat, c)).add_(
            _per_channel(mean_dy, c)
        )
        grad_c = ((grad - through_statistics) * _per_channel(factor, c)).to(c.dtype)
    return Gradients(grad_c, grad_weight, grad_bias)


def _per_channel(values: Tensor, c: Tensor) -> Tensor:
    """(channels,), to broadcast against c (n, channels, ...)."""
    return values.view(-1, *[1] * (c.dim() - 2))


def _all_but_channels(c: Tensor) -> list[int]:
    return [0, *range(2, c.dim())]


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
