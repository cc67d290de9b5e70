"""The pieces of BatchNorm, so that its output can be made again from its input.

Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
covariate shift" (2015), arXiv:1502.03167. With the statistics known it is c scale + shift, a
number of each for a channel, which is all that has to be kept besides its input c.

The numbers are PyTorch's to the bit (nn.BatchNorm2d), or those of utils/distributed/
sync_batch_norm.py where the statistics are of all ranks. On a GPU what is of the batch of one
process is computed by kernels, which round less often.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from utils.exchange import Exchange
from utils.fused import kernels

aten = torch.ops.aten


class Statistics(NamedTuple):
    """Of each channel, (channels,), in float32 or float64."""

    mean: Tensor
    spread: Tensor  # 1 / sqrt(variance + eps); of running statistics the variance
    count: Tensor | None = None  # (): values that they are of, where those are of all ranks


def of_batch(norm: nn.Module) -> bool:
    """Whether it normalises by the batch's statistics, and not by the running ones."""
    return norm.training or norm.running_mean is None


def exchange_of(norm: nn.Module) -> Exchange | None:
    """With the ranks whose samples a training BatchNorm counts, too."""
    exchange = getattr(norm, "exchange", None) if norm.training else None
    return exchange if exchange is not None and exchange.size > 1 else None


def take_statistics(norm: nn.Module, c: Tensor) -> tuple[Statistics, Tensor, Tensor]:
    """What `norm` normalises c (n, channels, height, width) by, and scale and shift:
    BatchNorm(c) = c scale + shift. Its running statistics follow, as they do in its own forward."""
    exchange = exchange_of(norm)
    kernel = kernels.images(c) if of_batch(norm) and exchange is None else None
    if kernel is not None:
        mean, spread, scale, shift = _by_kernels(kernel, norm, c)
        return Statistics(mean, spread), scale, shift
    if not of_batch(norm):
        statistics = Statistics(norm.running_mean.clone(), norm.running_var.clone())
        inverse = 1 / (statistics.spread + norm.eps).sqrt()
    elif exchange is not None:
        statistics, inverse = _of_all_ranks(norm, c, exchange)
    else:
        statistics = _of_this_rank(norm, c)
        inverse = statistics.spread
    if norm.weight is None:
        return statistics, inverse, -statistics.mean * inverse
    scale = inverse * norm.weight
    return statistics, scale, torch.addcmul(norm.bias, statistics.mean, scale, value=-1)


def _by_kernels(kernel: ModuleType, norm: nn.Module, c: Tensor) -> tuple[Tensor, ...]:
    _refuse_one_value(c)
    share, mean, var = _share(norm), norm.running_mean, norm.running_var
    if not (norm.training and norm.track_running_stats):
        mean = var = None
    return kernel.batch_numbers(c, norm.weight, norm.bias, norm.eps, mean, var, share)


def _refuse_one_value(c: Tensor) -> None:
    if c.numel() // c.shape[1] < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got {c.shape}")


def _of_this_rank(norm: nn.Module, c: Tensor) -> Statistics:
    _refuse_one_value(c)
    share, mean, var = _share(norm), norm.running_mean, norm.running_var
    if not (norm.training and norm.track_running_stats):
        share, exact = 0.0, c.dtype if c.dtype == torch.float64 else torch.float32
        mean = var = c.new_zeros(c.shape[1], dtype=exact)
    mean, var = torch.batch_norm_update_stats(c, mean, var, share)
    # Rounded once: PyTorch computes it so.
    return Statistics(mean, (var.double() + norm.eps).rsqrt().to(var.dtype))


def _share(norm: nn.Module) -> float:
    """Of the batch in the new running statistics."""
    if not (norm.training and norm.track_running_stats):
        return 0.0
    norm.num_batches_tracked.add_(1)
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _of_all_ranks(norm: nn.Module, c: Tensor, exchange: Exchange) -> tuple[Statistics, Tensor]:
    """And 1 / sqrt(variance + eps) of the rounded variance, which the plain module scales by."""
    mean, var, count = all_statistics(c, exchange)
    if c.device.type == "cpu" and count < 2:
        raise ValueError(f"BatchNorm needs two values of a channel, and got {int(count)}")
    if norm.track_running_stats:
        share, unbiased = _share(norm), var * (count / (count - 1))
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    exact = torch.float64 if c.dtype == torch.float64 else torch.float32
    statistics = Statistics(mean.to(exact), (var + norm.eps).rsqrt().to(exact), count)
    return statistics, 1 / (var.to(exact) + norm.eps).sqrt()


def all_statistics(c: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over the values of all ranks, (channels,) each, and
    the number of values, (); in float64.

    The variance is that within the ranks and that between their means, and no difference of large
    numbers.
    """
    channels = c.shape[1]
    own = c.new_zeros(2 * channels + 1, dtype=torch.float64)
    own[0] = c.numel() // channels
    if c.numel():
        var, mean = torch.var_mean(at_least_float32(c), (0, 2, 3), correction=0)
        own[1 : channels + 1], own[channels + 1 :] = mean, var
    every = torch.stack(exchange.gather(own))  # (ranks, 2 * channels + 1)
    count, mean, var = every[:, :1], every[:, 1 : channels + 1], every[:, channels + 1 :]
    total = count.sum()
    middle = (count * mean).sum(0) / total
    spread = (count * (var + (mean - middle).square())).sum(0) / total
    return middle, spread, total


def third_is_faster(tensor: Tensor) -> bool:
    """Whether a CPU writes the result of an operation faster to another tensor than to one of its
    own: of half precision it does (torch 2.15), and of the others it does not."""
    return tensor.device.type == "cpu" and tensor.dtype.itemsize == 2


def gate(grad: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """The gradient of ReLU's input from that of its output y; `out` may be one of them."""
    return aten.threshold_backward.grad_input(grad, y, 0, grad_input=out)


def added(tensor: Tensor, other: Tensor) -> Tensor:
    """tensor + other, where `tensor` is nobody's afterwards."""
    return torch.add(tensor, other, out=None if third_is_faster(tensor) else tensor)


class Again(NamedTuple):
    """relu(c scale + shift), or relu(c scale + shift + what is added): made from little as often as
    it is wanted.

    kept / keep is the factor of each sample (n, 1, 1, 1) that drop-path gives it; what is added is
    a tensor, or without a ReLU of its own, an Again.
    """

    c: Tensor  # (n, channels, height, width)
    scale: Tensor  # (channels,)
    shift: Tensor
    kept: Tensor | None = None
    keep: float = 1.0
    add: "Again | Tensor | None" = None

    def into(self, out: Tensor) -> Tensor:
        """Written to `out`, a tensor of c's shape, dtype and strides."""
        other = self.add.c if isinstance(self.add, Again) else self.add
        kernel = kernels.images(self.c, *([] if other is None else [other]))
        if kernel is not None:
            how = self.c, self.scale, self.shift, True, self.kept, self.keep, other
            numbers = self.add[1:3] if isinstance(self.add, Again) else ()
            return kernel.affine(*how, *numbers, out=out)
        return torch.clamp_min(self._before_relu(None if third_is_faster(out) else out), 0, out=out)

    def _before_relu(self, out: Tensor | None) -> Tensor:
        """In `out`, or None: in memory of its own."""
        # BatchNorm of mean 0 and variance 1 is one pass over c, and rounds as the real one does.
        ones, zeros = torch.ones_like(self.scale), torch.zeros_like(self.scale)
        how = self.scale, self.shift, zeros, ones, False, 0.0, 0.0
        if out is None:
            value = aten.native_batch_norm(self.c, *how)[0]
        else:
            unused = {"save_mean": ones.new_empty(0), "save_invstd": ones.new_empty(0)}
            value = aten.native_batch_norm.out(self.c, *how, out=out, **unused)[0]
        if self.kept is not None:
            value.mul_(self.kept).div_(self.keep)
        if self.add is None:
            return value
        other = self.add._before_relu(None) if isinstance(self.add, Again) else self.add
        return torch.add(value, other, out=out)


class Gradients(NamedTuple):
    """Of BatchNorm's input and, where it has them, weight and bias."""

    c: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Gate(NamedTuple):
    """The ReLU behind a BatchNorm."""

    y: Tensor  # its output
    out: Tensor  # for the gradient of its input
    alone: bool  # y is made of the BatchNorm alone, and nobody else wants that gradient


def backward(
    grad: Tensor,
    output: Again,
    weight: Tensor | None,
    statistics: Statistics,
    norm: nn.Module,
    needed: tuple[bool, bool, bool],
    batch: bool,
    exchange: Exchange | None,
    relu: Gate | None = None,
) -> Gradients:
    """From the gradient of the output, or of the output of `relu`.

    Args:
        output: of BatchNorm; its c is the input.
        statistics: that it was normalised by; `batch`: they are the batch's.
        needed: of input, weight and bias.
        exchange: with the ranks that the statistics are of, None: of this one.
    """
    needed = (needed[0], needed[1] and weight is not None, needed[2] and weight is not None)
    c = output.c
    kernel = kernels.images(c) if batch and exchange is None else None
    if kernel is not None:
        return _backward_by_kernels(kernel, grad, output, weight, statistics, needed, relu)
    if relu is not None:
        grad = gate(grad, relu.y, relu.out)
    if exchange is not None:
        return backward_of_all_ranks(grad, c, weight, statistics, needed, exchange)
    mean, spread, _ = statistics
    running = (None, None, mean, spread) if batch else (mean, spread, None, None)
    found = aten.native_batch_norm_backward(
        grad, c, weight, *running, batch, norm.eps, list(needed)
    )
    return Gradients(*(part if want else None for part, want in zip(found, needed, strict=True)))


def _backward_by_kernels(
    kernel: ModuleType,
    grad: Tensor,
    output: Again,
    weight: Tensor | None,
    statistics: Statistics,
    needed: tuple[bool, ...],
    relu: Gate | None,
) -> Gradients:
    """In two passes, the ReLU's among them: its gradient is written only where others want it."""
    c = output.c
    numbers = kernel.Numbers(statistics.mean, statistics.spread, output.scale, output.shift)
    grad = grad.contiguous(memory_format=torch.channels_last)
    alone = relu is not None and relu.alone
    if relu is None or alone:
        sums = kernel.gradient_sums(grad, c, numbers, relu=alone)
    else:
        sums = kernel.gradient_sums(grad, c, numbers, y=relu.y, gated=relu.out)
        grad = relu.out
    of_c = None
    if needed[0]:
        of_c = kernel.input_gradient(grad, c, numbers, sums, relu=alone, out=torch.empty_like(c))
    of_bias, of_weight = sums if weight is None else sums.to(weight.dtype)
    return Gradients(of_c, of_weight if needed[1] else None, of_bias if needed[2] else None)


def backward_of_all_ranks(grad, c, weight, statistics, needed, exchange) -> Gradients:
    """dc = weight spread (dy - sum(dy) / N - x^ sum(dy x^) / N), x^ = (c - mean) spread, with sums
    over all ranks; those that are the gradients of weight and bias are this rank's own."""
    mean, spread, count = statistics
    normal = (at_least_float32(c) - wide(mean)).mul_(wide(spread))  # x^
    grad = at_least_float32(grad)
    sums = torch.stack([grad.sum((0, 2, 3)), (grad * normal).sum((0, 2, 3))])
    of_weight = of_bias = of_c = None
    if weight is not None:
        of_bias, of_weight = sums.to(weight.dtype)
    if needed[0]:
        of_mean, of_normal = exchange.sum(sums) / count.to(sums.dtype)
        factor = spread if weight is None else spread * weight
        rest = normal.mul_(wide(of_normal)).add_(wide(of_mean))
        of_c = ((grad - rest) * wide(factor)).to(c.dtype)
    return Gradients(of_c, of_weight, of_bias)


def wide(channels: Tensor) -> Tensor:
    return channels[:, None, None]


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
