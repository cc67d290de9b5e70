"""Convolution, BatchNorm and ReLU of a residual block, fused into few passes over memory.

    branch    c1 = conv1(x), c2 = conv2(relu(bn1(c1))), c3 = conv3(relu(bn2(c2)))
    shortcut  x, or bn(conv(x)), or none
    y         relu(bn3(c3) + shortcut)

The plain modules save two activations per convolution: its output, and the ReLU's output, which is
the next convolution's input.

    speed     saves the same. BatchNorm, residual addition and ReLU are one pass.
    memory    saves c1, c2, c3, the output of the shortcut's convolution, and a few values per
              channel for each BatchNorm. ReLU outputs are recomputed from them in the backward
              pass (see batch_norm.py). So is x, from the block before, recursively, back to the
              last block whose shortcut has a convolution: the outputs of a stage are recomputed
              together in the backward pass, and freed together.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import refuse_second_derivative
from .batch_norm import (
    BatchNormOutput,
    ReluBackward,
    Statistics,
    add,
    batch_norm_backward,
    normalization,
    prefers_out_of_place,
    relu_backward,
    statistics_exchange,
    uses_batch_statistics,
)
from .cast import cast_together

aten = torch.ops.aten
PRODUCTS_ON = ("cuda",)  # see _is_product; the tests add "cpu"


class ConvNorm(NamedTuple):
    """A convolution and the BatchNorm that follows it."""

    conv: nn.Conv2d
    norm: nn.Module

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.conv.weight, self.conv.bias, self.norm.weight, self.norm.bias


class Chain:
    """Passed from block to block within one forward pass: remembers the previous block's output,
    so that the next block can have it recomputed instead of saving it, and casts the weights of
    `convolutions` together under autocast. Weights that FSDP has yet to gather are cast by their
    blocks."""

    def __init__(self, convolutions: Iterable[nn.Conv2d] = ()):
        self.output: Tensor | None = None
        self.version = 0
        self.scratch = Scratch()
        self.cast_weights: dict = {}  # {weight: in the dtype of autocast}
        weights = [c.weight for c in convolutions if not hasattr(c.weight, "to_local")]
        if weights and torch.is_autocast_enabled(device := weights[0].device.type):
            cast = cast_together(weights, [torch.get_autocast_dtype(device)] * len(weights))
            self.cast_weights = dict(zip(weights, cast, strict=True))

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A convolution's weight or bias in this dtype."""
        cast = self.cast_weights.get(tensor, tensor)
        return cast if cast.dtype == dtype else tensor.to(dtype)

    def record(self, y: Tensor) -> None:
        self.output, self.version = y, y._version

    def producer(self, x: Tensor):
        """The autograd node that can recompute x, if x is the previous block's output or an alias
        of it (hooks may make one); else None."""
        y = self.output
        if y is None or x.dtype != y.dtype or x.shape != y.shape:
            return None
        if x.data_ptr() == y.data_ptr() and x._version == self.version:
            return y.grad_fn
        return None

    def end(self) -> None:
        self.output = None
        self.scratch.clear()


class Scratch:
    """Reused buffers, one per name and dtype: newly allocated memory is slow on a CPU."""

    def __init__(self):
        self.memory: dict = {}

    def like(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        memory = self.memory.get((name, tensor.dtype))
        if memory is None or memory.numel() < tensor.numel():
            self.memory[name, tensor.dtype] = memory = tensor.new_empty(tensor.numel())
        return memory.as_strided(tensor.shape, tensor.stride())

    def clear(self) -> None:
        self.memory.clear()


def fused_block(
    x: Tensor,
    branch: list[tuple[nn.Module, nn.Module]],
    shortcut: nn.Module | str | None = None,
    drop_path: nn.Module | None = None,
    chain: Chain | None = None,
    mode: str = "memory",
) -> Tensor:
    """relu(branch(x) + shortcut(x)), with a ReLU between the branch's convolutions.

    Args:
        x: (n, channels, height, width).
        branch: pairs of convolution and BatchNorm.
        shortcut: None: nothing is added; "input": x itself; or an nn.Sequential of convolution and
            BatchNorm.
        drop_path: a module with `rate` and `draw`, applied to the branch in training.
        chain: shared by the blocks of this forward pass.
        mode: "memory" or "speed", see the head of the file.
    """
    units = [ConvNorm(*pair) for pair in branch]
    if isinstance(shortcut, nn.Module):
        units.append(ConvNorm(*shortcut))
    path_mask, keep_rate = None, 1.0
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if drop_path is not None and drop_path.training and getattr(drop_path, "rate", 0.0):
        path_mask, keep_rate = drop_path.draw(x), 1 - drop_path.rate
    plan = BlockPlan(units, len(branch), shortcut == "input", keep_rate, mode == "memory")
    chain = chain or Chain()
    tensors = [tensor for unit in units for tensor in unit.tensors]
    with torch.autocast(device, enabled=False):
        y = _Block.apply(plan, chain.producer(x), chain, path_mask, x, *tensors)
    chain.record(y)
    return y


class BlockPlan(NamedTuple):
    units: list[ConvNorm]  # the branch's, then the shortcut's if it has one
    depth: int  # units of the branch
    adds_input: bool
    keep_rate: float  # 1 - drop-path's rate
    recompute: bool  # ReLU outputs, in the backward pass


def _convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, stride = _sliced(conv, x)
    return F.conv2d(x, weight, bias, stride, conv.padding, conv.dilation, conv.groups)


def _sliced(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Input and stride. A strided 1x1 convolution with `drops_first` gets only the pixels that it
    uses, and stride 1."""
    if not getattr(conv, "drops_first", False):
        return x, conv.stride
    return x[:, :, :: conv.stride[0], :: conv.stride[1]], (1, 1)


def _convolution_backward(
    conv: nn.Conv2d,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needed: tuple[bool, ...],
    add_to: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, all of x's dtype. To that of x `add_to` is added, which may
    be overwritten."""
    inner, stride = _sliced(conv, x)
    grad_x = grad_weight = grad_bias = None
    if needed[0] and add_to is not None and inner is x and _is_product(conv, grad, add_to):
        # It adds to what it overwrites: two passes over memory less than a sum afterwards.
        _rows(add_to).addmm_(_rows(grad), weight.flatten(1))
        grad_x, add_to, needed = add_to, None, (False, *needed[1:])
    if any(needed):
        sizes = None if bias is None else bias.shape
        found, grad_weight, grad_bias = aten.convolution_backward(
            grad, inner, weight, sizes, stride, conv.padding, conv.dilation, False, (0, 0),
            conv.groups, needed,
        )  # fmt: skip
        grad_x = found if needed[0] else grad_x
    if needed[0] and inner is not x:
        unsliced = torch.zeros_like(x) if add_to is None else add_to
        unsliced[:, :, :: conv.stride[0], :: conv.stride[1]] += grad_x
        grad_x = unsliced
    elif needed[0] and add_to is not None:
        grad_x = add(grad_x, add_to)
    return grad_x, grad_weight if needed[1] else None, grad_bias if needed[2] else None


def _is_product(conv: nn.Conv2d, *tensors: Tensor) -> bool:
    """Whether the gradient of the convolution's input is a product of matrices that a GPU computes
    in one pass over these tensors: in half precision, whose products have one way of rounding."""
    last = torch.channels_last
    return (
        conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.groups == 1
        and tuple(conv.padding) == (0, 0)
        and all(t.device.type in PRODUCTS_ON and t.dtype.itemsize == 2 for t in tensors)
        and all(t.is_contiguous(memory_format=last) for t in tensors)
    )  # fmt: skip


def _rows(image: Tensor) -> Tensor:
    """(n, channels, height, width) in channels_last as a matrix with a row for each pixel."""
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])


class _Block(torch.autograd.Function):
    """The formulas at the head of the file. `producer`: the node that can recompute x; None: x is
    saved."""

    @staticmethod
    def forward(ctx, plan: BlockPlan, producer, chain: Chain, path_mask, x: Tensor, *tensors):
        units, depth, scratch = plan.units, plan.depth, chain.scratch
        all_c, norm_values, relu_outputs, a, used = [], [], [], x, list(tensors)
        for index, unit in enumerate(units):
            a = x if index == depth else a
            of_conv = slice(4 * index, 4 * index + 2)
            used[of_conv] = [t if t is None else chain.cast(t, x.dtype) for t in used[of_conv]]
            c = _convolve(unit.conv, a, *used[of_conv])
            statistics, scale, shift = normalization(unit.norm, c)
            all_c.append(c)
            norm_values.append((*statistics, scale, shift))
            if index < depth - 1:
                out = scratch.like(c, "input") if plan.recompute else torch.empty_like(c)
                a = BatchNormOutput(c, scale, shift).compute_into(out)
                relu_outputs.append(None if plan.recompute else a)
        ctx.plan, ctx.producer, ctx.scratch = plan, producer, scratch
        ctx.batch_statistics = [uses_batch_statistics(unit.norm) for unit in units]
        ctx.exchanges = [statistics_exchange(unit.norm) for unit in units]
        ctx.recomputed = None
        output = _output(plan, x, path_mask, all_c, norm_values)
        y = output.compute_into(torch.empty_like(output.c))
        flat = [value for values in norm_values for value in values]
        ends = (None if producer else x, None) if plan.recompute else (x, y)
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.save_for_backward(*ends, path_mask, *relu_outputs, *all_c, *flat, *used)
        return y

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        plan, saved = ctx.plan, _Saved(ctx)
        units, depth = plan.units, plan.depth
        needs_x, needs = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        grads: list[Tensor | None] = [None] * len(needs)  # of `tensors` in forward

        def norm_backward(index: int, grad: Tensor, relu: ReluBackward | None, needs_c: bool):
            """Gradient of the unit's c, from that of BatchNorm's output, or of the output of the
            ReLU that follows."""
            needs_affine = needs[4 * index + 2 : 4 * index + 4]
            grad_c, grads[4 * index + 2], grads[4 * index + 3] = batch_norm_backward(
                grad, saved.norm_output(index), saved.tensors(index)[2], saved.statistics(index),
                units[index].norm, (needs_c, *needs_affine), ctx.batch_statistics[index],
                ctx.exchanges[index], relu,
            )  # fmt: skip
            return grad_c

        def convolution_backward(
            index: int, grad_c: Tensor, a: Tensor, needs_a: bool, add_to: Tensor | None = None
        ):
            """Gradient of a, the convolution's input, plus `add_to`."""
            needed = needs_a, *needs[4 * index : 4 * index + 2]
            weight, bias, *_ = saved.tensors(index)
            grad_a, *grads[4 * index : 4 * index + 2] = _convolution_backward(
                units[index].conv, grad_c, a, weight, bias, needed, add_to
            )
            return grad_a

        y, ctx.recomputed = _block_output(ctx), None
        out_of_place = prefers_out_of_place(y)
        # A recomputed y is not needed once its sign has been read, so it may be overwritten.
        overwrite_y = plan.recompute and not out_of_place
        relu_grad = y if overwrite_y else ctx.scratch.like(y, "last")  # of the last ReLU's input
        grad_out: Tensor = grad
        relu: ReluBackward | None = ReluBackward(y, relu_grad, only_norm=False)
        if saved.path_mask is not None:
            masked = relu_backward(grad, y, relu_grad) * saved.path_mask
            grad_out, relu = masked.div_(plan.keep_rate), None
        del y
        for index in reversed(range(depth)):
            needs_a = needs_x or any(needs[: 4 * index])
            needs_c = needs_a or any(needs[4 * index : 4 * index + 2])
            grad_c, relu = norm_backward(index, grad_out, relu, needs_c), None
            if not needs_c:
                break
            a = _block_input(ctx, saved) if index == 0 else saved.relu(index - 1, ctx.scratch)
            add_to = relu_grad if index == 0 and plan.adds_input else None
            grad_out = convolution_backward(index, grad_c, a, needs_a, add_to)
            if not needs_a:
                break
            if index:
                out = ctx.scratch.like(a, "inner") if out_of_place else grad_out
                relu = ReluBackward(a, out, only_norm=True)
            del a, grad_c
        grad_x = grad_out if needs_x else None
        needs_shortcut = needs[4 * depth :]
        if len(units) > depth and (needs_x or any(needs_shortcut)):
            needs_c = needs_x or any(needs_shortcut[:2])
            grad_c = norm_backward(depth, relu_grad, None, needs_c)
            if needs_c:
                x = _block_input(ctx, saved)
                grad_x = convolution_backward(depth, grad_c, x, needs_x, grad_x)
        if ctx.producer is None:
            ctx.scratch.clear()
        return None, None, None, None, grad_x, *cast_together(grads, ctx.dtypes)


class _Saved:
    """The tensors that a block's forward pass saved, by name. Per unit there are five BatchNorm
    values (mean, inverse_std, count, scale, shift) and four tensors (`ConvNorm.tensors`, the
    convolution's in the dtype in which it was computed)."""

    def __init__(self, ctx):
        self.x, self.y, self.path_mask, *rest = ctx.saved_tensors
        inner, count = ctx.plan.depth - 1, len(ctx.plan.units)
        self.relu_outputs, rest = rest[:inner], rest[inner:]
        self.c, self.rest, self.count = rest[:count], rest[count:], count

    def norm_values(self, index: int) -> list[Tensor | None]:
        return self.rest[5 * index : 5 * index + 5]

    def statistics(self, index: int) -> Statistics:
        return Statistics(*self.norm_values(index)[:3])

    def tensors(self, index: int) -> list[Tensor | None]:
        first = 5 * self.count + 4 * index
        return self.rest[first : first + 4]

    def norm_output(self, index: int) -> BatchNormOutput:
        scale, shift = self.norm_values(index)[3:]
        return BatchNormOutput(self.c[index], scale, shift)

    def relu(self, index: int, scratch: Scratch) -> Tensor:
        """relu(bn(c)) of a unit within the branch."""
        if self.relu_outputs[index] is not None:
            return self.relu_outputs[index]
        return self.norm_output(index).compute_into(scratch.like(self.c[index], "input"))


def _output(
    plan: BlockPlan, x: Tensor, path_mask: Tensor | None, c: list[Tensor], norm_values: list
) -> BatchNormOutput:
    """The block's output. `norm_values`: for each unit, with scale and shift last."""
    residual = x if plan.adds_input else None
    if len(c) > plan.depth:
        residual = BatchNormOutput(c[-1], *norm_values[-1][-2:])
    last, (scale, shift) = plan.depth - 1, norm_values[plan.depth - 1][-2:]
    return BatchNormOutput(c[last], scale, shift, path_mask, plan.keep_rate, residual)


def _block_output(ctx) -> Tensor:
    """The output of a block, saved or recomputed; recomputed only once, whoever asks for it."""
    saved = _Saved(ctx)
    if saved.y is not None:
        return saved.y
    if ctx.recomputed is None:
        norm_values = [saved.norm_values(index) for index in range(saved.count)]
        x = _block_input(ctx, saved) if ctx.plan.adds_input else None
        output = _output(ctx.plan, x, saved.path_mask, saved.c, norm_values)
        ctx.recomputed = output.compute_into(torch.empty_like(output.c))
    return ctx.recomputed


def _block_input(ctx, saved: _Saved) -> Tensor:
    return _block_output(ctx.producer) if saved.x is None else saved.x
