"""Convolution, BatchNorm and ReLU, also of a whole residual block, that keep one activation of
each convolution: its output before BatchNorm.

The plain modules keep two, the outputs of the convolution and of the ReLU, which the next
convolution needs. Here the second is made again from the first in the backward pass (see
batch_norm.py), that of a block from what the block before made, too, back to the last block whose
shortcut has a convolution. So a stage's outputs come and go together in the backward pass.

    branch    c1 = conv1(x), c2 = conv2(relu(bn1(c1))), c3 = conv3(relu(bn2(c2)))
    shortcut  x, or bn(conv(x)), or none
    y         relu(bn3(c3) + shortcut)
    kept      c1, c2, c3, the shortcut's convolution, and each BatchNorm's few numbers; not x, if
              the block before can make it again
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.batch_norm import (
    Again,
    Statistics,
    add_,
    backward,
    exchange_of,
    gate,
    of_batch,
    take_statistics,
    third_is_faster,
)

aten = torch.ops.aten


class Unit(NamedTuple):
    """A convolution and the BatchNorm behind it."""

    conv: nn.Conv2d
    norm: nn.Module

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.conv.weight, self.conv.bias, self.norm.weight, self.norm.bias


class Chain:
    """From block to block of one forward pass: what makes the last output again."""

    def __init__(self):
        self.output: Tensor | None = None
        self.version = 0
        self.scratch = Scratch()

    def follow(self, y: Tensor) -> None:
        self.output, self.version = y, y._version

    def source(self, x: Tensor):
        """The node of autograd that makes x again, if x is the last output: it may have come
        through a hook, as an alias."""
        y = self.output
        same = y is not None and x.dtype == y.dtype and x.shape == y.shape
        if same and x.data_ptr() == y.data_ptr() and x._version == self.version:
            return y.grad_fn
        return None

    def end(self) -> None:
        self.output = None
        self.scratch.drop()


class Scratch:
    """Memory for one tensor at a time under each name, used again and again: fresh memory is slow
    on a CPU."""

    def __init__(self):
        self.memory: dict = {}

    def like(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        memory = self.memory.get((name, tensor.dtype))
        if memory is None or memory.numel() < tensor.numel():
            self.memory[name, tensor.dtype] = memory = tensor.new_empty(tensor.numel())
        return memory.as_strided(tensor.shape, tensor.stride())

    def drop(self) -> None:
        self.memory.clear()


def fused_block(
    x: Tensor,
    branch: list[tuple[nn.Module, nn.Module]],
    shortcut: nn.Module | str | None = None,
    drop_path: nn.Module | None = None,
    chain: Chain | None = None,
) -> Tensor:
    """relu(branch(x) + shortcut(x)), with a ReLU between the branch's units.

    Args:
        x: (n, channels, height, width).
        branch: pairs of convolution and BatchNorm.
        shortcut: None: nothing is added; "input": x; or a convolution and a BatchNorm in a
            sequence.
        drop_path: with `rate` and `draw`; what it does in training is done to the branch.
        chain: of this forward pass.
    """
    units = [Unit(*pair) for pair in branch]
    if isinstance(shortcut, nn.Module):
        units.append(Unit(*shortcut))
    kept, keep = None, 1.0
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if drop_path is not None and drop_path.training and getattr(drop_path, "rate", 0.0):
        kept, keep = drop_path.draw(x), 1 - drop_path.rate
    plan = Plan(units, len(branch), shortcut == "input", keep)
    chain = chain or Chain()
    tensors = [tensor for unit in units for tensor in unit.tensors]
    with torch.autocast(device, enabled=False):
        y = _Block.apply(plan, chain.source(x), chain.scratch, kept, x, *tensors)
    chain.follow(y)
    return y


class Plan(NamedTuple):
    units: list[Unit]  # of the branch, and that of the shortcut
    depth: int  # of the branch
    adds_input: bool
    keep: float  # 1 - the rate of drop-path


def _convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    x, stride = _sliced(conv, x)
    return F.conv2d(x, weight, bias, stride, conv.padding, conv.dilation, conv.groups)


def _sliced(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Input and stride, of a convolution that drops unused pixels first without them."""
    if not getattr(conv, "drops_first", False):
        return x, conv.stride
    return x[:, :, :: conv.stride[0], :: conv.stride[1]], (1, 1)


def _convolution_backward(conv, grad, x, weight, bias, needed) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias."""
    inner, stride = _sliced(conv, x)
    sizes = None if bias is None else bias.shape
    of_x, of_weight, of_bias = aten.convolution_backward(
        grad, inner, weight.to(x.dtype), sizes, stride, conv.padding, conv.dilation, False,
        (0, 0), conv.groups, needed,
    )  # fmt: skip
    if needed[0] and inner is not x:
        of_all = torch.zeros_like(x)
        of_all[:, :, :: conv.stride[0], :: conv.stride[1]] = of_x
        of_x = of_all
    of_weight = of_weight.to(weight.dtype) if needed[1] else None
    return of_x if needed[0] else None, of_weight, of_bias.to(bias.dtype) if needed[2] else None


class _Block(torch.autograd.Function):
    """The formulas at the head of the file. `source` makes x again; None: x is kept."""

    @staticmethod
    def forward(ctx, plan: Plan, source, scratch: Scratch, kept, x: Tensor, *tensors):
        units, depth = plan.units, plan.depth
        all_c, numbers, a = [], [], x
        for index, unit in enumerate(units):
            a = x if index == depth else a
            c = _convolve(unit.conv, a, *tensors[4 * index : 4 * index + 2])
            statistics, scale, shift = take_statistics(unit.norm, c)
            all_c.append(c)
            numbers.append((*statistics, scale, shift))
            if index < depth - 1:
                a = Again(c, scale, shift).into(scratch.like(c, "input"))
        ctx.plan, ctx.source, ctx.scratch = plan, source, scratch
        ctx.of_batch = [of_batch(unit.norm) for unit in units]
        ctx.exchanges = [exchange_of(unit.norm) for unit in units]
        ctx.made = None
        every = [part for parts in numbers for part in parts]
        ctx.save_for_backward(None if source else x, kept, *all_c, *every, *tensors)
        y = _output(plan, x, kept, all_c, numbers)
        return y.into(torch.empty_like(all_c[depth - 1]))

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # `once_differentiable` would leave parts out unsaid
            raise RuntimeError("fused blocks have no second derivative: take --fused none")
        plan, saved = ctx.plan, _Saved(ctx)
        units, depth = plan.units, plan.depth
        needs_x, needs = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        found: list[Tensor | None] = [None] * len(needs)
        y, ctx.made = _made(ctx), None
        third = third_is_faster(y)  # else into the memory of y, which nobody needs any more
        grad = gate(grad, y, out=ctx.scratch.like(y, "last") if third else y)
        del y
        x = _input(ctx, saved)

        def unit_backward(index: int, grad: Tensor, a: Tensor, of_a: bool) -> Tensor | None:
            """From the gradient of BatchNorm's output; a is the convolution's input."""
            unit, (weight, bias, scale, _) = units[index], saved.tensors(index)
            want = needs[4 * index : 4 * index + 4]
            deeper = of_a or want[0] or want[1]
            of_c, found[4 * index + 2], found[4 * index + 3] = backward(
                grad, saved.c[index], scale, saved.statistics(index), unit.norm,
                (deeper, *want[2:]), ctx.of_batch[index], ctx.exchanges[index],
            )  # fmt: skip
            if not deeper:
                return None
            of_a, found[4 * index], found[4 * index + 1] = _convolution_backward(
                unit.conv, of_c, a, weight, bias, (of_a, *want[:2])
            )
            return of_a

        inner = grad
        if saved.kept is not None:
            inner = (grad * saved.kept).div_(plan.keep)
        for index in reversed(range(depth)):
            deeper = needs_x or any(needs[: 4 * index])
            a = (
                x
                if index == 0
                else saved.again(index - 1).into(ctx.scratch.like(saved.c[index - 1], "input"))
            )
            inner = unit_backward(index, inner, a, deeper)
            if not deeper:
                break
            if index:
                inner = gate(inner, a, out=ctx.scratch.like(a, "inner") if third else inner)
        del a
        of_x = inner if needs_x else None
        if len(units) > depth and (needs_x or any(needs[4 * depth :])):
            of_shortcut = unit_backward(depth, grad, x, needs_x)
            of_x = add_(of_x, of_shortcut) if needs_x else None
        elif needs_x and plan.adds_input:
            of_x = add_(of_x, grad)
        if ctx.source is None:
            ctx.scratch.drop()
        return None, None, None, None, of_x, *found


class _Saved:
    """What a block has kept, by its meaning."""

    def __init__(self, ctx):
        self.x, self.kept, *rest = ctx.saved_tensors
        count = len(ctx.plan.units)
        self.c, self.rest, self.count = rest[:count], rest[count:], count

    def statistics(self, index: int) -> Statistics:
        return Statistics(*self.rest[5 * index : 5 * index + 3])

    def tensors(self, index: int) -> list[Tensor | None]:
        first = 5 * self.count + 4 * index
        return self.rest[first : first + 4]

    def again(self, index: int) -> Again:
        return Again(self.c[index], *self.rest[5 * index + 3 : 5 * index + 5])


def _output(plan: Plan, x: Tensor, kept: Tensor | None, c: list[Tensor], numbers: list) -> Again:
    """What a block returns. `numbers`: of each unit, scale and shift last."""
    add = x if plan.adds_input else None
    if len(c) > plan.depth:
        add = Again(c[-1], *numbers[-1][-2:], relu=False)
    last = plan.depth - 1
    return Again(c[last], *numbers[last][-2:], True, kept, plan.keep, add)


def _made(ctx) -> Tensor:
    """The output of a block, made again once for all who ask for it."""
    if ctx.made is None:
        saved = _Saved(ctx)
        numbers = [saved.rest[5 * index : 5 * index + 5] for index in range(saved.count)]
        x = _input(ctx, saved) if ctx.plan.adds_input else None
        again = _output(ctx.plan, x, saved.kept, saved.c, numbers)
        ctx.made = again.into(torch.empty_like(again.c))
    return ctx.made


def _input(ctx, saved: _Saved) -> Tensor:
    return _made(ctx.source) if ctx.source is not None else saved.x
