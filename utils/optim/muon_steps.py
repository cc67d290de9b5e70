"""Muon as an optimizer (see muon.py): on a GPU a step launches a few kernels for all matrices of a
shape, and the host never waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from ..exchange import Exchange
from ..machine.backends import is_faster_in_bf16
from .multi_tensor import (
    Flags,
    MultiTensor,
    Parameters,
    add_step,
    by_steps,
    flat_gradients,
    flat_like,
    is_dense,
    unless_left_out,
)

RMS = 0.2  # of a step before the learning rate; AdamW's steps have about this one
LEAST_NORM = 1e-7  # matrices are divided by their norm, and never by less than this
BETAS, EPSILON = (0.9, 0.95), 1e-7  # of Adam
# How many elements of matrices are stepped at once, which bounds the memory that it takes; a
# ResNet-50 has fewer.
PIECE = 1 << 25
# Of the five Newton-Schulz iterations, as in modded-nanogpt and timm:
# https://leloykun.github.io/ponder/muon-opt-coeffs/.
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def is_matrix(shape: torch.Size) -> bool:
    """Whether a parameter of this shape is stepped as a matrix, if its group does not leave it to
    Adam: a kernel or matrix with several rows and columns (or channels) whose flattened form has
    sides of 4 or more, the longer one up to 128 times the shorter. timm's rule."""
    if len(shape) < 2 or 1 in shape[:2]:
        return False
    shorter, longer = sorted(flattened(shape))
    return shorter >= 4 and longer <= 128 * shorter


def flattened(shape: torch.Size) -> tuple[int, int]:
    """(rows, columns) of a matrix or kernel."""
    return shape[0], shape[1:].numel()


class Muon(MultiTensor):
    """See muon.py and `MultiTensor`.

    State of a parameter: `use_muon`, whether it is stepped as a matrix. If it is,
    `momentum_buffer`, else `exp_avg` and `exp_avg_sq`, of its shape, and `step`, a float32 tensor
    () that parameters share, without the steps that were left out.

    While a step runs, float32 matrices take at most 12 bytes for each element (20 where iterations
    are made in float32, see `precision_of`), for PIECE elements (0.4 GB) or a single larger matrix
    at a time; what Adam steps, twice its own memory.

    Parameters of a group with `use_fallback` are stepped by Adam, whatever their shapes; `momentum`
    is that of matrices, and `normalize` scales these to rows of norm 1, on average, before each
    step. Where parameters are sharded, each rank gathers whole matrices, and makes the iterations
    for all of them.
    """

    DEFAULTS: ClassVar[dict] = {"momentum": 0.95, "weight_decay": 0.0, "normalize": False}

    def prepare(self, group: dict, parameters: list[Tensor]) -> list[Parameters]:
        matrices: dict[bool, list[Tensor]] = {}  # by whether they are sharded
        others = []
        for parameter in parameters:
            state = self.state[parameter]
            if "use_muon" not in state:
                shape = self.exchange.shape(parameter)
                state["use_muon"] = is_matrix(shape) and not group.get("use_fallback", False)
            if state["use_muon"]:
                sharded = self.exchange.is_divided(parameter)
                matrices.setdefault(sharded, []).append(parameter)
            else:
                others.append(parameter)
        return [
            *(Matrices(group, each, self.state, self.exchange) for each in matrices.values()),
            *(NesterovAdam(group, cohort, self.state) for cohort in by_steps(others, self.state)),
        ]


@dataclass(frozen=True)
class Block:
    """Parameters of one shape, which follow each other in a flat tensor.

    Attributes:
        parameters: the parameters, or this rank's rows of them.
        shape: (rows, columns) of the whole matrices.
    """

    parameters: list[Tensor]
    shape: tuple[int, int]

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter and the longer side."""
        return min(self.shape), max(self.shape)

    @property
    def local(self) -> tuple[int, int, int]:
        """Shape of this rank's rows: (matrices, rows, columns)."""
        return len(self.parameters), len(self.parameters[0]), self.shape[1]

    def turned(self, stack: Tensor) -> Tensor:
        """(matrices, *shape) -> (matrices, *sides), or the other way round; a view."""
        return stack.mT if self.shape[0] > self.shape[1] else stack


class Matrices(Parameters):
    """The matrices of one group; all of them are sharded over the ranks, or none.

    Matrices of one shape, and of that shape transposed, go through the Newton-Schulz iterations in
    one stack. The order of columns makes no difference to the singular vectors: kernels stay in
    their memory order.

    Attributes:
        pieces: blocks that are stepped at once. They follow each other in the order of
            `parameters`, those with the same `sides` side by side.
        lengths: what `normalize` makes of the norms of `parameters`.
    """

    def __init__(self, group: dict, parameters: list[Tensor], state: dict, exchange: Exchange):
        shapes = [flattened(exchange.shape(parameter)) for parameter in parameters]
        order = sorted(range(len(shapes)), key=lambda i: (sorted(shapes[i]), shapes[i]))
        super().__init__(group, [parameters[i] for i in order])
        self.exchange = exchange
        self.is_sharded = exchange.is_divided(parameters[0])
        self.momenta = self.buffers(state, "momentum_buffer")
        self.precision = precision_of(self.dense[0])
        self.pieces = self._pieces([shapes[i] for i in order])
        self.lengths = self.dense[0].new_tensor([shapes[i][0] ** 0.5 for i in order])

    def fits(self, parameter: Tensor) -> bool:
        """Rows must lie one after the other, too."""
        in_rows = len(parameter) < 2 or parameter.stride(0) == parameter[0].numel()
        return is_dense(parameter) and in_rows

    def _pieces(self, shapes: list[tuple[int, int]]) -> list[list[Block]]:
        pieces, left = [[]], PIECE
        for shape, same in groupby(range(len(shapes)), key=lambda i: shapes[i]):
            members, numel = list(same), shape[0] * shape[1]
            most = max(1, PIECE // numel)
            for start in range(0, len(members), most):
                parameters = [self.parameters[i] for i in members[start : start + most]]
                if len(parameters) * numel > left and pieces[-1]:
                    pieces.append([])
                    left = PIECE
                pieces[-1].append(Block(parameters, shape))
                left -= len(parameters) * numel
        return pieces

    def step_(self, flags: Flags) -> None:
        group, like = self.group, self.dense[0]
        gradients = self.make_dense(self.gradients())
        torch._foreach_mul_(self.momenta, unless_left_out(group["momentum"], 1.0, flags, like))
        if group["normalize"]:
            scales = self.lengths / self._norms(self.dense)
            scales = unless_left_out(scales, 1.0, flags, like).unbind()
            torch._foreach_mul_(self.dense, scales)
        elif group["weight_decay"]:
            keep = 1 - group["lr"] * group["weight_decay"]
            torch._foreach_mul_(self.dense, unless_left_out(keep, 1.0, flags, like))
        start = 0
        for blocks in self.pieces:
            end = start + sum(len(block.parameters) for block in blocks)
            self._step_piece(blocks, slice(start, end), gradients[start:end], flags)
            start = end
        self.write_views()

    def _step_piece(
        self, blocks: list[Block], members: slice, gradients: list[Tensor], flags: Flags
    ) -> None:
        """
        b <- m b + (1 - m) g,   u = (1 - m) g + m b,
        w <- (1 - lr weight_decay) w - lr RMS sqrt(longer side) O(u)

        but for what `step_` has done: m b and (1 - lr weight_decay) w.
        """
        group, parameters, momenta = self.group, self.dense[members], self.momenta[members]
        flat, parts = flat_gradients(gradients, parameters, flags)
        flat.mul_(1 - group["momentum"])
        torch._foreach_add_(momenta, parts)
        torch._foreach_add_(parts, momenta, alpha=group["momentum"])  # now u
        local = flat.split([math.prod(block.local) for block in blocks])
        local = [own.view(block.local) for own, block in zip(local, blocks, strict=True)]
        self._orthogonalize_(blocks, local, self._norms(parts))
        torch._foreach_mul_(local, [RMS * block.sides[1] ** 0.5 for block in blocks])
        flat.mul_(unless_left_out(-group["lr"], 0.0, flags, flat))
        torch._foreach_add_(parameters, parts)

    def _norms(self, parts: list[Tensor]) -> Tensor:
        """The norms of whole matrices, (n,). Collective if they are sharded."""
        norms = torch.stack(torch._foreach_norm(parts))
        if self.is_sharded:
            norms = self.exchange.sum(norms.square()).sqrt()
        return norms.clamp(min=LEAST_NORM)

    def _orthogonalize_(self, blocks: list[Block], local: list[Tensor], norms: Tensor) -> None:
        """Replaces this rank's rows of matrices by those of the orthogonalized matrices. Collective
        if they are sharded: one for each block."""
        by_block = norms.split([len(block.parameters) for block in blocks])
        members = zip(blocks, local, by_block, strict=True)
        stacked = [list(same) for _, same in groupby(members, key=lambda member: member[0].sides)]
        stacks = [self._stack(same) for same in stacked]
        orthogonalize_(stacks)
        for same, stack in zip(stacked, stacks, strict=True):
            for (block, own, _), part in zip(same, _split(stack, same), strict=True):
                whole = block.turned(part).transpose(0, 1)  # (rows, matrices, columns)
                own.copy_(self.exchange.part(block.parameters[0], whole).transpose(0, 1))

    def _stack(self, members: list[tuple[Block, Tensor, Tensor]]) -> Tensor:
        """(matrices, *sides), divided by their norms. Members: (block, this rank's rows, norms)."""
        total = sum(len(norms) for _, _, norms in members)
        stack = members[0][1].new_empty(total, *members[0][0].sides, dtype=self.precision)
        for (block, own, norms), part in zip(members, _split(stack, members), strict=True):
            self._write_whole(block, own, norms, block.turned(part))
        return stack

    def _write_whole(self, block: Block, local: Tensor, norms: Tensor, target: Tensor) -> None:
        """Whole matrices, divided by their norms."""
        if not self.is_sharded:
            torch.div(local, norms[:, None, None], out=target)
            return
        rows = (local.transpose(0, 1) / norms[:, None]).to(self.precision)
        whole = self.exchange.whole(block.parameters[0], rows)  # (rows, matrices, columns)
        target.copy_(whole.transpose(0, 1))


def _split(stack: Tensor, members: list[tuple[Block, Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return stack.split([len(norms) for _, _, norms in members])


def precision_of(parameter: Tensor) -> torch.dtype:
    """Of the Newton-Schulz iterations: bfloat16, but float32 on CPUs that are no faster in
    bfloat16, and float64 for float64 parameters, which are there to check the others."""
    if parameter.dtype == torch.float64:
        return torch.float64
    slow = parameter.device.type == "cpu" and not is_faster_in_bf16(parameter.device)
    return torch.float32 if slow else torch.bfloat16


def orthogonalize_(stacks: list[Tensor]) -> None:
    """Replaces each matrix by one with the same singular vectors, and singular values of about 1:
    the Newton-Schulz iterations of the page that muon.py names,

        A = X X^T,   X <- a X + (b A + c A A) X

    Products of the size of A are made for all matrices with equally many rows at once.

    Args:
        stacks: (matrices, rows, columns) each, with no more rows than columns, and singular values
            of at most 1.
    """
    by_rows: dict[int, list[int]] = {}
    for index, x in enumerate(stacks):
        by_rows.setdefault(x.shape[1], []).append(index)
    squares, polynomials, parts = [], [], {}
    for rows, members in by_rows.items():
        counts = [len(stacks[index]) for index in members]
        square = stacks[0].new_empty(sum(counts), rows, rows)
        polynomial = torch.empty_like(square)
        squares.append(square)
        polynomials.append(polynomial)
        pairs = zip(square.split(counts), polynomial.split(counts), strict=True)
        parts.update(zip(members, pairs, strict=True))
    for a, b, c in COEFFICIENTS:
        for index, x in enumerate(stacks):
            torch.bmm(x, x.mT, out=parts[index][0])
        for square, polynomial in zip(squares, polynomials, strict=True):
            torch.baddbmm(square, square, square, beta=b, alpha=c, out=polynomial)
        for index, x in enumerate(stacks):
            stacks[index] = torch.baddbmm(x, parts[index][1], x, beta=a)


class NesterovAdam(Parameters):
    """Parameters that Adam steps, with Nesterov momentum and decoupled weight decay, and have taken
    equally many steps."""

    def __init__(self, group: dict, parameters: list[Tensor], state: dict):
        super().__init__(group, parameters)
        self.m, self.v = (self.buffers(state, name) for name in ("exp_avg", "exp_avg_sq"))
        self.step = state[parameters[0]]["step"]

    def step_(self, flags: Flags) -> None:
        """
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   u = b1 m + (1 - b1) g,
        w <- (1 - lr weight_decay) w - lr u / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
        """
        (b1, b2), lr, parameters, like = BETAS, self.group["lr"], self.dense, self.dense[0]
        flat, parts = flat_gradients(self.make_dense(self.gradients()), parameters, flags)
        torch._foreach_mul_(self.v, unless_left_out(b2, 1.0, flags, like))
        torch._foreach_addcmul_(self.v, parts, parts, 1 - b2)
        flat.mul_(1 - b1)
        torch._foreach_mul_(self.m, unless_left_out(b1, 1.0, flags, like))
        torch._foreach_add_(self.m, parts)
        torch._foreach_add_(parts, self.m, alpha=b1)  # now u
        add_step(self.step, flags)
        t = self.step.clamp(min=1).double()  # 0 if the first step is left out
        divisors, roots = flat_like(parameters)
        torch._foreach_copy_(roots, self.v)
        divisors.sqrt_().mul_((1 - b2**t).rsqrt().to(like.dtype)).add_(EPSILON)
        flat.div_(divisors).mul_(unless_left_out(-lr / (1 - b1**t), 0.0, flags, like))
        if self.group["weight_decay"]:
            keep = 1 - lr * self.group["weight_decay"]
            torch._foreach_mul_(parameters, unless_left_out(keep, 1.0, flags, like))
        torch._foreach_add_(parameters, parts)
        self.write_views()
