"""Batches whose stacked gradients are in memory at once, and their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ...machine.backends import float32_products
from ..found_inf import is_on_host
from ..multi_tensor import Flags, Parameters
from ..muon_steps import LEAST_NORM, PIECE, orthogonalize_, precision_of
from .batch import Batch, as_parameters, fixed_norm
from .batched_fisher import Product, norms

SHORT = 16  # up to this axis length, rounding the inputs takes longer than multiplying them
ONE_BY_ONE = {"cpu"}  # devices where a stack is one batch: several would leave the cache


def in_stacks(batches: list[Batch]) -> list[list[Batch]]:
    """Divides batches of one device and dtype into those that take a step together, which need no
    more memory than the largest batch."""
    limit = max(batch.sizes[0] for batch in batches)
    stacks: list[list[Batch]] = []
    last: dict[tuple, list[Batch]] = {}
    for batch in batches:
        alone = batch.is_plain or batch.is_divided or batch.device.type in ONE_BY_ONE
        # One pair of other strides, and PyTorch's kernels for lists take tensor by tensor.
        layout = batch.parameters[0].dtype, batch.has_stacked_layout
        kind = id(batch.group), layout, batch.step, alone
        stack = last.get(kind, [])
        if not stack or alone or sum(each.sizes[0] for each in [*stack, batch]) > limit:
            stack = last[kind] = []
            stacks.append(stack)
        stack.append(batch)
    return stacks


class NaturalGradients:
    """The natural gradients of a batch, rescaled (see `fisher.py`).

    Args:
        dense: the batch's parameters in dense layout.
        memory, other: buffers of `batch.sizes`; the result is in one of them.

    Attributes:
        stacked: where the gradients are to be before `compute`, (B, D0, kernel ..., D1).
        values: the result, in the dtype and memory order of `dense`, for the fused kernel.
    """

    def __init__(self, batch: Batch, dense: list[Tensor], memory: Tensor, other: Tensor):
        self.batch, elements = batch, batch.shape.numel()
        self.stacked = memory[:elements].view(batch.shape)
        x = self.stacked.view(batch.shape_of_axes)
        unused = other[:elements].view(batch.shape_of_axes) if batch.sizes[1] else None
        self.products = []
        for axis in batch.axes:
            self.products.append(Product(x, axis, unused))
            x, unused = self.products[-1].result, self.products[-1].unused
        self.before, self.after = self.stacked.view(len(x), -1), x.view(len(x), -1)
        self.natural: Sequence[Tensor] = as_parameters(x.view(batch.shape))
        if batch.is_divided:
            parts = zip(batch.parameters, self.natural, strict=True)
            self.natural = [batch.exchange.part(parameter, whole) for parameter, whole in parts]
        self.values = self.natural
        if not batch.has_stacked_layout:
            size, memory = dense[0].numel(), unused.flatten().view(dense[0].dtype)
            self.values = [
                memory[i * size : (i + 1) * size].as_strided(p.shape, p.stride())
                for i, p in enumerate(dense)
            ]

    def compute(self) -> None:
        batch, group = self.batch, self.batch.group
        keeps_norm, updates = group["norm"] == "gradient", batch.updates_now
        before = norms(self.before) if keeps_norm or (updates and batch.axes) else None
        norm = before
        for product in self.products:
            axis = product.axis
            fast = group["products"] == "fast" and axis.multiplier.shape[-1] > SHORT
            with float32_products("fast") if fast else contextlib.nullcontext():
                product.take(before if updates and axis.is_ours else None, norm)
            norm = None
        if batch.is_orthogonal:
            self._orthogonalize()
        scale = (before if keeps_norm else fixed_norm(batch.of_one)) / norms(self.after)
        scale.nan_to_num_(1.0, posinf=1.0)  # of zeros, or of what float32 cannot square
        self.after.mul_(scale.unsqueeze(1))
        if self.values is not self.natural:
            torch._foreach_copy_(self.values, self.natural)

    def _orthogonalize(self) -> None:
        """Makes all singular values of each natural gradient about 1, as Muon does."""
        rows, columns = self.batch.lengths
        precision = precision_of(self.after)
        whole = self.after.view(-1, rows, columns)
        for some in whole.split(max(1, PIECE // (rows * columns))):
            some = some.mT if rows > columns else some
            norm = torch.linalg.vector_norm(some, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
            stack = [torch.empty(some.shape, dtype=precision, device=some.device)]
            torch.div(some, norm, out=stack[0])
            orthogonalize_(stack)
            some.copy_(stack[0])


class Stack(Parameters):
    """Batches that differ in shape alone, one of `in_stacks`: each kernel takes all their tensors.

    Args:
        memory, other: buffers that are large enough for the `sizes` of all together.
    """

    def __init__(self, batches: list[Batch], state: dict, memory: Tensor, other: Tensor):
        first = batches[0]
        super().__init__(first.group, [p for batch in batches for p in batch.parameters])
        self.batches, self.dtype, self.is_plain = batches, first.dtype, first.is_plain
        self.momenta = self.buffers(state, "momentum_buffer") if self.group["momentum"] else []
        # Whether it is of the gradients that are preconditioned, not of natural gradients.
        comes_first = self.group["momentum_first"] and not self.is_plain
        self.momentum_first = bool(self.momenta) and comes_first
        self.natural: list[NaturalGradients] = []
        for batch in [] if self.is_plain else batches:
            start = sum(len(each.values) for each in self.natural)
            dense = self.dense[start : start + len(batch.parameters)]
            self.natural.append(NaturalGradients(batch, dense, memory, other))
            memory, other = memory[batch.sizes[0] :], other[batch.sizes[1] :]
        self.stacked = [each for n in self.natural for each in as_parameters(n.stacked)]

    def step_(self, flags: Flags) -> None:
        if self.is_plain:
            self._descend(self.gradients(), flags)
            return
        if self.momentum_first:
            flags = self._take_momentum(flags)
        self._stack_gradients(flags)
        for natural in self.natural:
            natural.compute()
        self._descend([each for natural in self.natural for each in natural.values], flags)

    @property
    def dampening(self) -> float:
        return self.group["dampening"] if self.batches[0].step else 0.0  # as in SGD: b = g at first

    def _take_momentum(self, flags: Flags) -> Flags:
        """Adds the gradients to the momentum. The flags for the rest of the step, as the kernel has
        unscaled the gradients."""
        group = self.group
        coupled_decay = 0.0 if group["decoupled"] else group["weight_decay"]
        on_host = flags.found_inf is None or is_on_host(flags.found_inf)  # and zero, then
        if on_host and flags.grad_scale is None and not coupled_decay and not self.dampening:
            for buffer, gradient in zip(self.momenta, self.gradients(), strict=True):
                torch.add(gradient, buffer, alpha=group["momentum"], out=buffer)
            return flags
        self._fused_sgd(
            self.make_dense(self.gradients()),
            self.momenta,
            flags,
            lr=0.0,  # the parameters stay as they are
            weight_decay=coupled_decay,
            grad_scale=flags.grad_scale,
        )
        return Flags(flags.found_inf, None)

    def _stack_gradients(self, flags: Flags) -> None:
        """Writes the gradients, with coupled weight decay and with momentum where that comes first,
        to `stacked` of all batches."""
        if not self.batches[0].is_divided:
            self._copy_gradients(self.stacked, flags)
            return
        (natural,), first = self.natural, self.parameters[0]
        x = natural.stacked
        rows = x.new_empty(len(first), len(x), *x.shape[2:])  # (rows, B, kernel ..., D1)
        self._copy_gradients(as_parameters(rows.movedim(0, 1)), flags)
        whole = natural.batch.exchange.whole(first, rows)  # one collective for all tensors
        x.copy_(whole.movedim(0, 1))

    def _copy_gradients(self, stacked: Sequence[Tensor], flags: Flags) -> None:
        """Likewise for this rank's rows, unscaled."""
        if self.momentum_first and not self.group["nesterov"]:
            torch._foreach_copy_(stacked, self.momenta)
            return
        gradients, parameters = self.gradients(), self.parameters
        decay = 0.0 if self.group["decoupled"] else self.group["weight_decay"]
        as_they_are = flags.grad_scale is None and self.dtype == parameters[0].dtype
        if as_they_are and self.device.type == "cpu":
            # As few passes over memory as there can be.
            if decay:
                for target, gradient, parameter in zip(stacked, gradients, parameters, strict=True):
                    torch.add(gradient, parameter, alpha=decay, out=target)
                self._add_momenta(stacked)
            elif self.momentum_first:
                for target, gradient, buffer in zip(stacked, gradients, self.momenta, strict=True):
                    torch.add(gradient, buffer, alpha=self.group["momentum"], out=target)
            else:
                torch._foreach_copy_(stacked, gradients)
            return
        torch._foreach_copy_(stacked, gradients)
        if flags.grad_scale is not None:
            torch._foreach_div_(stacked, flags.grad_scale)
        if decay:
            torch._foreach_add_(stacked, parameters, alpha=decay)
        self._add_momenta(stacked)

    def _add_momenta(self, stacked: Sequence[Tensor]) -> None:
        """Nesterov's step ahead, where momentum comes first."""
        if self.momentum_first:
            torch._foreach_add_(stacked, self.momenta, alpha=self.group["momentum"])

    def _descend(self, gradients: list[Tensor], flags: Flags) -> None:
        """Momentum, unless it came first, and parameter update."""
        group, decay = self.group, self.group["weight_decay"]
        gradients = self.make_dense(gradients)
        # Without momentum the kernel's coupled decay is a decoupled one.
        of_kernel = self.momentum_first if group["decoupled"] else self.is_plain
        if decay and group["decoupled"] and not of_kernel:
            lr = group["lr"]  # a tensor where a CUDA graph holds the step
            shrink = 1 - (lr.double() if isinstance(lr, Tensor) else lr) * decay
            if flags.found_inf is not None:
                one = torch.ones((), dtype=self.dtype, device=self.device)
                shrink = torch.where(flags.left_out, one, (one * shrink).to(self.dtype))
            torch._foreach_mul_(self.dense, shrink)
        self._fused_sgd(
            gradients,
            [] if self.momentum_first else self.momenta,
            flags,
            lr=group["lr"],
            weight_decay=decay if of_kernel else 0.0,
            grad_scale=flags.grad_scale if self.is_plain else None,
        )
        self.write_views()

    def _fused_sgd(self, gradients: list[Tensor], momenta: list[Tensor], flags: Flags, **own):
        """PyTorch's fused kernel, which leaves all as it is where `found_inf`. `own`: what differs
        from call to call, its `lr`, `weight_decay` and `grad_scale`."""
        torch._fused_sgd_(
            self.dense,
            gradients,
            momenta,
            momentum=self.group["momentum"] if momenta else 0.0,
            dampening=self.dampening,
            nesterov=bool(self.group["nesterov"] and momenta),
            maximize=False,
            is_first_step=False,
            found_inf=flags.found_inf,
            **own,
        )
