"""Convolution, BatchNorm and ReLU, also of a whole residual block, in few passes over memory.

    branch    c1 = conv1(x), c2 = conv2(relu(bn1(c1))), c3 = conv3(relu(bn2(c2)))
    shortcut  x, or bn(conv(x)), or none
    y         relu(bn3(c3) + shortcut)

The plain modules keep two activations of each convolution: its output and that of the ReLU, which
the next convolution needs.

    speed     keeps the same. BatchNorm, what is added and ReLU are one pass.
    memory    keeps c1, c2, c3, the shortcut's convolution and each BatchNorm's few numbers. What
              ReLU makes is made again from them in the backward pass (see batch_norm.py), x from
              what the block before made, too, back to the last block whose shortcut has a
              convolution. So a stage's outputs come and go together in the backward pass.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.batch_norm import (
    Again,
    Gate,
    Statistics,
    added,
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
    mode: str = "memory",
) -> Tensor:
    """relu(branch(x) + shortcut(x)), with a ReLU between the branch's units.

    Args:
        x: (n, channels, height, width).
        branch: pairs of convolution and BatchNorm.
        shortcut: None: nothing is added; "input": x; or a convolution and a BatchNorm in a
            sequence.
        drop_path: with `rate` and `draw`; what it does in training is done to the branch.
        chain: of this forward pass.
        mode: "memory" or "speed", of what is kept.
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
    plan = Plan(units, len(branch), shortcut == "input", keep, mode == "memory")
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
    again: bool  # what ReLU makes is made again


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
        all_c, numbers, inputs, a = [], [], [], x
        for index, unit in enumerate(units):
            a = x if index == depth else a
            c = _convolve(unit.conv, a, *tensors[4 * index : 4 * index + 2])
            statistics, scale, shift = take_statistics(unit.norm, c)
            all_c.append(c)
            numbers.append((*statistics, scale, shift))
            if index < depth - 1:
                out = scratch.like(c, "input") if plan.again else torch.empty_like(c)
                a = Again(c, scale, shift).into(out)
                inputs.append(None if plan.again else a)
        ctx.plan, ctx.source, ctx.scratch = plan, source, scratch
        ctx.of_batch = [of_batch(unit.norm) for unit in units]
        ctx.exchanges = [exchange_of(unit.norm) for unit in units]
        ctx.made = None
        y = _output(plan, x, kept, all_c, numbers).into(torch.empty_like(all_c[depth - 1]))
        every = [part for parts in numbers for part in parts]
        ends = (None if source else x, None) if plan.again else (x, y)
        ctx.save_for_backward(*ends, kept, *inputs, *all_c, *every, *tensors)
        return y

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # `once_differentiable` would leave parts out unsaid
            raise RuntimeError("fused blocks have no second derivative: take --fused none")
        plan, saved = ctx.plan, _Saved(ctx)
        units, depth = plan.units, plan.depth
        needs_x, needs = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        found: list[Tensor | None] = [None] * len(needs)

        def norm_backward(index: int, grad: Tensor, relu: Gate | None, deeper: bool):
            """From the gradient of BatchNorm's output, or of the ReLU's behind it."""
            want = needs[4 * index + 2 : 4 * index + 4]
            of_c, found[4 * index + 2], found[4 * index + 3] = backward(
                grad, saved.again(index), saved.tensors(index)[2], saved.statistics(index),
                units[index].norm, (deeper, *want), ctx.of_batch[index], ctx.exchanges[index], relu,
            )  # fmt: skip
            return of_c

        def convolution_backward(index: int, of_c: Tensor, a: Tensor, of_a: bool):
            """a is the convolution's input."""
            want = needs[4 * index : 4 * index + 2]
            of_a, found[4 * index], found[4 * index + 1] = _convolution_backward(
                units[index].conv, of_c, a, *saved.tensors(index)[:2], (of_a, *want)
            )
            return of_a

        y, ctx.made = _made(ctx), None
        third = third_is_faster(y)
        # What is made again is nobody's any more, once its sign has been read.
        gated = y if plan.again and not third else ctx.scratch.like(y, "last")
        inner, relu = grad, Gate(y, gated, alone=False)
        if saved.kept is not None:
            inner, relu = (gate(grad, y, gated) * saved.kept).div_(plan.keep), None
        del y
        for index in reversed(range(depth)):
            needs_a = needs_x or any(needs[: 4 * index])
            deeper = needs_a or any(needs[4 * index : 4 * index + 2])
            of_c, relu = norm_backward(index, inner, relu, deeper), None
            if not deeper:
                break
            a = _input(ctx, saved) if index == 0 else saved.relu(index - 1, ctx.scratch)
            inner = convolution_backward(index, of_c, a, needs_a)
            if not needs_a:
                break
            if index:
                out = ctx.scratch.like(a, "inner") if third else inner
                relu = Gate(a, out, alone=True)
            del a, of_c
        of_x = inner if needs_x else None
        of_shortcut = needs[4 * depth :]
        if len(units) > depth and (needs_x or any(of_shortcut)):
            deeper = needs_x or any(of_shortcut[:2])
            of_c = norm_backward(depth, gated, None, deeper)
            if deeper:
                of_side = convolution_backward(depth, of_c, _input(ctx, saved), needs_x)
                of_x = added(of_x, of_side) if needs_x else None
        elif needs_x and plan.adds_input:
            of_x = added(of_x, gated)
        if ctx.source is None:
            ctx.scratch.drop()
        return None, None, None, None, of_x, *found


class _Saved:
    """What a block has kept, by its meaning."""

    def __init__(self, ctx):
        self.x, self.y, self.kept, *rest = ctx.saved_tensors
        inner, count = ctx.plan.depth - 1, len(ctx.plan.units)
        self.inputs, rest = rest[:inner], rest[inner:]
        self.c, self.rest, self.count = rest[:count], rest[count:], count

    def statistics(self, index: int) -> Statistics:
        return Statistics(*self.rest[5 * index : 5 * index + 3])

    def tensors(self, index: int) -> list[Tensor | None]:
        first = 5 * self.count + 4 * index
        return self.rest[first : first + 4]

    def again(self, index: int) -> Again:
        return Again(self.c[index], *self.rest[5 * index + 3 : 5 * index + 5])

    def relu(self, index: int, scratch: Scratch) -> Tensor:
        """relu(bn(c)) of a unit within the branch."""
        if self.inputs[index] is not None:
            return self.inputs[index]
        return self.again(index).into(scratch.like(self.c[index], "input"))


def _output(plan: Plan, x: Tensor, kept: Tensor | None, c: list[Tensor], numbers: list) -> Again:
    """What a block returns. `numbers`: of each unit, scale and shift last."""
    add = x if plan.adds_input else None
    if len(c) > plan.depth:
        add = Again(c[-1], *numbers[-1][-2:])
    last = plan.depth - 1
    return Again(c[last], *numbers[last][-2:], kept, plan.keep, add)


def _made(ctx) -> Tensor:
    """The output of a block; made again once for all who ask for it."""
    saved = _Saved(ctx)
    if saved.y is not None:
        return saved.y
    if ctx.made is None:
        numbers = [saved.rest[5 * index : 5 * index + 5] for index in range(saved.count)]
        x = _input(ctx, saved) if ctx.plan.adds_input else None
        again = _output(ctx.plan, x, saved.kept, saved.c, numbers)
        ctx.made = again.into(torch.empty_like(again.c))
    return ctx.made


def _input(ctx, saved: _Saved) -> Tensor:
    return _made(ctx.source) if saved.x is None else saved.x
