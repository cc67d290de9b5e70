"""The parameters of one shape that NGD steps together, and their state."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.machine.float32 import float32_products
from utils.optim.ngd import fisher
from utils.optim.ngd.batched_fisher import FISHER, AxisBatch, precondition_, square_norms

EARLY_UPDATES = 10  # steps from the start that all update the Fisher matrices, as in Kaldi
# Root mean square of a step of a fixed size, before the learning rate: that of AdamW's steps, to
# which Muon's are scaled as well (Liu et al., "Muon is scalable for LLM training" (2025),
# arXiv:2502.16982, section 2.2).
FIXED_RMS = 0.2
SHORT = 16  # up to this length, as along kernels, to round factors takes longer than to multiply


@dataclass
class Flags:
    """What a step is told from outside, as GradScaler does: () tensors or None."""

    found_inf: Tensor | None
    grad_scale: Tensor | None

    @staticmethod
    def of(optimizer, device: torch.device) -> Flags:
        found_inf = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
        return Flags(
            None if found_inf is None else found_inf.to(device, non_blocking=True),
            None if scale is None else scale.to(device, non_blocking=True),
        )

    @property
    def left_out(self) -> Tensor | None:
        """() bool: nothing may change."""
        return None if self.found_inf is None else self.found_inf > 0


class Batch:
    """Parameters of one group, shape and age, and their state; any shapes where `is_plain`.

    Stacked gradients have the shape (B, D0, kernel ..., D1), as a convolution's weights lie in
    memory in channels_last: so both large axes are rows or columns of matrices, and nothing needs
    to be transposed. Where parameters are divided among the ranks, the stacked gradients are whole
    ones, and momentum and step are of this rank's rows.

    Attributes:
        views: places of the parameters that leave out elements of a larger tensor. The fused kernel
            takes what it is given for dense, and would write to these.
        dense: what it steps: the parameters, or contiguous copies of those in `views`.
    """

    def __init__(
        self, group: dict, parameters: list[Tensor], state: dict, step: int, exchange: Exchange
    ):
        first = parameters[0]
        self.group, self.parameters, self.step, self.exchange = group, parameters, step, exchange
        self.of_one = exchange.shape(first)
        self.is_divided = exchange.is_divided(first)
        self.device, self.dtype = first.device, kind_of(first)["dtype"]
        self.views = [index for index, p in enumerate(parameters) if not is_dense(p)]
        self.dense = list(parameters)
        for index in self.views:
            self.dense[index] = parameters[index].clone(memory_format=torch.contiguous_format)
        self.momenta = []
        if group["momentum"]:
            for parameter, dense in zip(parameters, self.dense, strict=True):
                buffer = state[parameter].get("momentum_buffer")
                if buffer is None:
                    state[parameter]["momentum_buffer"] = torch.zeros_like(dense)
                elif buffer.stride() != dense.stride():  # the fused kernel walks through memory
                    state[parameter]["momentum_buffer"] = torch.empty_like(dense).copy_(buffer)
            self.momenta = [state[parameter]["momentum_buffer"] for parameter in parameters]
        self.numbers = axes_of(self.of_one, group["axes"])  # of the axes, in a parameter
        self.axes = [self._axis(number, state) for number in self.numbers]
        self.is_plain = is_plain(self.of_one, group)
        self.size = 0 if self.is_plain else len(parameters) * self.of_one.numel()
        # (B, D0, kernel ..., D1), or what there is of these
        self.shape = len(parameters), *self.of_one[:1], *self.of_one[2:], *self.of_one[1:2]
        stacked = _as_parameters(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        self.lies_stacked = all(
            one.stride() == p.stride() and one.dtype == p.dtype
            for one, p in zip(stacked, self.dense, strict=True)
        )
        self.takes_two = not self.lies_stacked or any(axis.whole for axis in self.axes)

    def _axis(self, number: int, state: dict) -> AxisBatch:
        """The Fisher matrices of an axis; the parameters' state becomes views of them."""
        first = self.parameters[0]
        length, kind = self.of_one[number], kind_of(first)
        rank = min(self.group["rank"] or fisher.default_rank(length), length - 1)
        new = fisher.zero_fisher(rank, length, **kind)
        stacked = {}
        for name in FISHER:
            start, key = getattr(new, name), f"{name}_{number}"
            known = [state[parameter].get(key, start) for parameter in self.parameters]
            if any(value.shape != start.shape for value in known):
                raise RuntimeError(f"NGD: the state is not of rank {rank}: keep the group's `rank`")
            stacked[name] = torch.stack(known)
            for parameter, view in zip(self.parameters, stacked[name].unbind(), strict=True):
                state[parameter][key] = view
        dim = {0: 1, 1: first.ndim}.get(number, number)
        return AxisBatch(dim, self.group["alpha"], self.group["eta"], **stacked)

    def is_of(self, state: dict) -> bool:
        """Whether this is still what the state holds: not if that was loaded."""
        for index, parameter in enumerate(self.parameters):
            own = state[parameter]
            if self.momenta and own.get("momentum_buffer") is not self.momenta[index]:
                return False
            for number, axis in zip(self.numbers, self.axes, strict=True):
                basis = own.get(f"basis_{number}")
                if basis is None or basis.data_ptr() != axis.basis[index].data_ptr():
                    return False
        return True

    @property
    def updates_now(self) -> bool:
        """Whether the Fisher matrices take up the gradients of this step."""
        return self.step < EARLY_UPDATES or self.step % self.group["update_period"] == 0

    def follow_settings(self) -> None:
        """Takes up what may change from step to step."""
        for axis in self.axes:
            axis.eta = self.group["eta"]
            axis.set_alpha(self.group["alpha"])

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters]

    def precondition(self, memory: Tensor, other: Tensor, flags: Flags) -> list[Tensor]:
        """Natural gradients, scaled, in the memory given, of `size` elements each; `other` is used
        where `takes_two`. See `fisher.py`."""
        x = memory[: self.size].view(self.shape)
        other = other[: self.size].view(self.shape) if self.takes_two else None
        self._stack(x, flags)
        square = square_norms(x)
        for axis in self.axes:
            learns = self.updates_now and axis.is_ours
            with self._products(axis):
                x, other = precondition_(x, axis, other, square if learns else None)
        wanted = square if self.group["norm"] == "gradient" else fixed_square(self.of_one)
        scale = (wanted / (square_norms(x) if self.axes else square)).sqrt()
        x *= torch.where(scale.isfinite(), scale, 1.0).view(-1, *[1] * len(self.of_one))
        natural = _as_parameters(x)
        if self.is_divided:
            parts = zip(self.parameters, natural, strict=True)
            natural = tuple(self.exchange.part(parameter, whole) for parameter, whole in parts)
        return self._as_they_lie(natural, other)

    def _products(self, axis: AxisBatch) -> contextlib.AbstractContextManager:
        fast = self.group["products"] == "fast" and axis.multiplier.shape[-1] > SHORT
        return float32_products("fast") if fast else contextlib.nullcontext()

    def _as_they_lie(
        self, natural: tuple[Tensor, ...], memory: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The same in the dtype and order in memory of what the fused kernel walks through."""
        if self.lies_stacked:
            return natural
        parameters = self.dense
        size, memory = parameters[0].numel(), memory.flatten().view(parameters[0].dtype)
        laid = tuple(
            memory[i * size : (i + 1) * size].as_strided(p.shape, p.stride())
            for i, p in enumerate(parameters)
        )
        torch._foreach_copy_(laid, natural)
        return laid

    def _stack(self, x: Tensor, flags: Flags) -> None:
        """Copies the gradients, with the coupled weight decay, to x (B, D0, kernel ..., D1)."""
        if not self.is_divided:
            self._copy(_as_parameters(x), flags)
            return
        first = self.parameters[0]
        rows = x.new_empty(len(first), len(x), *x.shape[2:])  # (rows, B, kernel ..., D1)
        self._copy(_as_parameters(rows.movedim(0, 1)), flags)
        x.copy_(self.exchange.whole(first, rows).movedim(0, 1))  # of all tensors in one go

    def _copy(self, stacked: tuple[Tensor, ...], flags: Flags) -> None:
        """The gradients as they are given, of this rank's rows, with the coupled weight decay."""
        gradients, parameters = self.gradients(), self.parameters
        decay = 0.0 if self.group["decoupled"] else self.group["weight_decay"]
        if (
            self.device.type == "cpu"
            and flags.grad_scale is None
            and self.dtype == parameters[0].dtype
        ):
            # In one pass over memory.
            for target, gradient, parameter in zip(stacked, gradients, parameters, strict=True):
                if decay:
                    torch.add(gradient, parameter, alpha=decay, out=target)
                else:
                    target.copy_(gradient)
            return
        torch._foreach_copy_(stacked, gradients)
        if flags.grad_scale is not None:
            torch._foreach_div_(stacked, flags.grad_scale)
        if decay:
            torch._foreach_add_(stacked, parameters, alpha=decay)

    def precondition_one_by_one(self, flags: Flags) -> list[Tensor]:
        """The same, and the updates, by the definition in `fisher.py`."""
        natural = []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad.to(self.dtype)
            if flags.grad_scale is not None:
                gradient = gradient / flags.grad_scale
            if self.group["weight_decay"] and not self.group["decoupled"]:
                gradient = gradient + self.group["weight_decay"] * parameter
            if index in self.views:  # products round by the order in memory
                gradient = gradient.contiguous()
            gradient = self.exchange.whole(parameter, gradient)
            for number, axis in zip(self.numbers, self.axes, strict=True):
                turned = gradient.movedim(number, -1)
                x = turned.reshape(-1, turned.shape[-1])
                own = [getattr(axis, name)[index] for name in FISHER]
                before = fisher.Fisher(*own)
                x_hat = fisher.precondition(x, before, axis.alpha)
                if self.updates_now:
                    after = fisher.update(x, before, axis.eta)
                    for name, value in zip(FISHER, own, strict=True):
                        value.copy_(getattr(after, name))
                gradient = x_hat.view(turned.shape).movedim(-1, number)
            if self.group["norm"] == "fixed":
                scale = (fixed_square(self.of_one) / gradient.square().sum()).sqrt()
                gradient = gradient * scale if scale.isfinite() else gradient
            own = self.exchange.part(parameter, gradient)
            natural.append(torch.empty_like(self.dense[index]).copy_(own))
        return natural

    def descend(self, gradients: list[Tensor], flags: Flags) -> None:
        """Momentum, and the step itself, in PyTorch's fused kernel."""
        group, parameters = self.group, self.dense
        if self.views:
            gradients = list(gradients)
        for index in self.views:
            parameters[index].copy_(self.parameters[index])
            gradients[index] = gradients[index].contiguous()
        decay, coupled = group["weight_decay"], not group["decoupled"]
        if decay and not coupled:
            shrink = 1 - group["lr"] * decay
            if flags.found_inf is not None:
                whole = torch.ones((), dtype=self.dtype, device=self.device)
                shrink = torch.where(flags.left_out, whole, whole * shrink)
            torch._foreach_mul_(parameters, shrink)
        torch._fused_sgd_(
            parameters,
            gradients,
            self.momenta,
            weight_decay=decay if coupled and self.is_plain else 0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"] if self.step else 0.0,  # as in SGD: b = g at first
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,
            grad_scale=flags.grad_scale if self.is_plain else None,
            found_inf=flags.found_inf,
        )
        for index in self.views:
            self.parameters[index].copy_(parameters[index])


def _as_parameters(stacked: Tensor) -> tuple[Tensor, ...]:
    """(B, D0, kernel ..., D1) -> B views (D0, D1, kernel ...)"""
    return (stacked.movedim(-1, 2) if stacked.ndim > 3 else stacked).unbind()


def fixed_square(shape: torch.Size) -> float:
    """The squared norm of a step of a fixed size, before the learning rate."""
    return FIXED_RMS**2 * shape.numel()


def is_plain(shape: torch.Size, group: dict) -> bool:
    """Whether the fused kernel takes the gradient as it is: plain momentum."""
    return group["norm"] == "gradient" and not axes_of(shape, "all")


def axes_of(shape: torch.Size, which: str) -> list[int]:
    """Numbers of the axes that have a Fisher matrix; none where there is one alone."""
    long = [number for number, length in enumerate(shape) if length > 1]
    if len(long) < 2 or shape.numel() == 0:
        return []
    return long if which == "all" else [number for number in long if number < 2]


def is_dense(parameter: Tensor) -> bool:
    """Whether its elements fill one piece of memory, in any order of the axes."""
    size = 1
    for stride, length in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if length != 1 and stride != size:
            return parameter.numel() == 0
        size *= length
    return True


def is_expanded(parameter: Tensor) -> bool:
    """Whether several elements are one in memory, as PyTorch finds it before it writes."""
    strides = zip(parameter.stride(), parameter.shape, strict=True)
    return parameter.numel() > 0 and any(s == 0 and length > 1 for s, length in strides)


def kind_of(parameter: Tensor) -> dict:
    """dtype and device of the Fisher matrices of a parameter."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return {"dtype": dtype, "device": parameter.device}
