"""Parameters that NGD updates together, and their state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...exchange import Exchange
from ...machine.backends import float32_products
from ..found_inf import is_on_host
from ..multi_tensor import Flags, Parameters
from .batched_fisher import AxisBatch, norms, precondition_
from .fisher import default_rank, zero_fisher

EARLY_UPDATES = 10  # the first steps all update the Fisher matrices, as in Kaldi
# Root mean square of a step with norm "fixed", before the learning rate. It is that of AdamW's
# steps, to which Muon's are scaled, too (Liu et al., "Muon is scalable for LLM training" (2025),
# arXiv:2502.16982, section 2.2).
FIXED_RMS = 0.2
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW, PyTorch's
SHORT = 16  # up to this axis length, rounding the inputs takes longer than multiplying them


class Batch(Parameters):
    """Parameters of one group, shape and step count, and their state; any shapes if `is_plain`.

    Stacked gradients have the shape (B, D0, kernel ..., D1), the memory order of a convolution's
    weight in channels_last: both large axes are then rows or columns of matrices, and nothing needs
    to be transposed. Where parameters are sharded over the ranks, the stacked gradients are those
    of whole parameters, while momentum and step cover this rank's rows.

    Attributes:
        numbers: the axes of a parameter that have a Fisher matrix.
        size: elements of the stacked gradients, 0 if `is_plain`.
        has_stacked_layout: whether parameters have the memory order and dtype of the stacked
            gradients.
        needs_second_buffer: whether `precondition` does.
    """

    def __init__(
        self, group: dict, parameters: list[Tensor], state: dict, step: int, exchange: Exchange
    ):
        super().__init__(group, parameters)
        first = parameters[0]
        self.step, self.exchange = step, exchange
        self.of_one = exchange.shape(first)
        self.is_divided = exchange.is_divided(first)
        self.dtype = kind_of(first)["dtype"]
        self.momenta = self.buffers(state, "momentum_buffer") if group["momentum"] else []
        self.numbers = axes_of(self.of_one, group["axes"])
        self.axes = [self._axis(number, state) for number in self.numbers]
        self.is_plain = is_plain(self.of_one, group)
        self.size = 0 if self.is_plain else len(parameters) * self.of_one.numel()
        # (B, D0, kernel ..., D1), without the axes that do not exist
        self.shape = len(parameters), *self.of_one[:1], *self.of_one[2:], *self.of_one[1:2]
        stacked = _as_parameters(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        self.has_stacked_layout = all(
            one.stride() == p.stride() and one.dtype == p.dtype
            for one, p in zip(stacked, self.dense, strict=True)
        )
        self.needs_second_buffer = not self.has_stacked_layout or any(
            axis.whole for axis in self.axes
        )

    def _axis(self, number: int, state: dict) -> AxisBatch:
        """The Fisher matrices of an axis. The parameters' state is replaced by views of them."""
        first = self.parameters[0]
        length, kind = self.of_one[number], kind_of(first)
        fisher_rank = min(self.group["rank"] or default_rank(length), length - 1)
        stacked = {}
        for name, start in zero_fisher(fisher_rank, length, **kind).items():
            key = f"{name}_{number}"
            values = [state[parameter].get(key, start) for parameter in self.parameters]
            if any(value.shape != start.shape for value in values):
                raise RuntimeError(
                    f"NGD: the state is not of rank {fisher_rank}: keep the group's `rank`"
                )
            stacked[name] = torch.stack(values)
            for parameter, view in zip(self.parameters, stacked[name].unbind(), strict=True):
                state[parameter][key] = view
        dim = {0: 1, 1: first.ndim}.get(number, number)
        settings = {name: self.group[name] for name in ("alpha", "eta", "power")}
        return AxisBatch(dim, **settings, **stacked)

    def is_of(self, state: dict) -> bool:
        """Whether `state` still holds this batch's tensors; it does not after loading a state."""
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
        """Whether this step updates the Fisher matrices."""
        return self.step < EARLY_UPDATES or self.step % self.group["update_period"] == 0

    @property
    def together(self) -> tuple:
        """Equal for batches that always update together."""
        return self.device, self.dtype, self.group["update_period"], self.step

    def follow_settings(self) -> bool:
        """Applies settings that may change from step to step. Whether multipliers depend on what
        has changed."""
        changed = any(axis.alpha != self.group["alpha"] for axis in self.axes)
        for axis in self.axes:
            axis.eta, axis.alpha = self.group["eta"], self.group["alpha"]
        return changed

    @property
    def momentum_first(self) -> bool:
        """Momentum is taken of the gradients that are preconditioned, not of natural gradients."""
        return bool(self.group["momentum_first"] and self.momenta and not self.is_plain)

    def _take_momentum(self, flags: Flags) -> Flags:
        """Where momentum comes first, adds the gradients to it. The flags for the rest of the step,
        as the kernel has unscaled the gradients."""
        if not self.momentum_first:
            return flags
        group = self.group
        coupled_decay = 0.0 if group["decoupled"] else group["weight_decay"]
        dampening = group["dampening"] if self.step else 0.0  # as in SGD: b = g at first
        on_host = flags.found_inf is None or is_on_host(flags.found_inf)  # and zero, then
        if on_host and flags.grad_scale is None and not coupled_decay and not dampening:
            for buffer, gradient in zip(self.momenta, self.gradients(), strict=True):
                torch.add(gradient, buffer, alpha=group["momentum"], out=buffer)
            return flags
        self._fused_sgd(
            self.make_dense(self.gradients()),
            flags,
            lr=0.0,  # the parameters stay as they are
            momenta=self.momenta,
            weight_decay=coupled_decay,
            grad_scale=flags.grad_scale,
        )
        return Flags(flags.found_inf, None)

    def precondition(self, memory: Tensor, other: Tensor, flags: Flags) -> Sequence[Tensor]:
        """Natural gradients, rescaled (see `fisher.py`).

        Args:
            memory, other: buffers of at least `size` elements; the result is in one of them.
                `other` is used only if `needs_second_buffer`.
        """
        x = memory[: self.size].view(self.shape)
        other = other[: self.size].view(self.shape) if self.needs_second_buffer else None
        flags = self._take_momentum(flags)
        self._stack_gradients(x, flags)
        keeps_norm = self.group["norm"] == "gradient"
        before = norms(x) if keeps_norm or (self.updates_now and self.axes) else None
        norm = before
        for axis in self.axes:
            update = self.updates_now and axis.is_ours
            with self._products(axis):
                x, other = precondition_(x, axis, other, before if update else None, norm)
            norm = None
        scale = (before if keeps_norm else fixed_norm(self.of_one)) / norms(x)
        scale.nan_to_num_(1.0, posinf=1.0)  # of zeros, or of what float32 cannot square
        x *= scale.view(-1, *[1] * len(self.of_one))
        natural = _as_parameters(x)
        if self.is_divided:
            parts = zip(self.parameters, natural, strict=True)
            natural = tuple(self.exchange.part(parameter, whole) for parameter, whole in parts)
        return self._as_dense(natural, other)

    def _products(self, axis: AxisBatch) -> contextlib.AbstractContextManager:
        fast = self.group["products"] == "fast" and axis.multiplier.shape[-1] > SHORT
        return float32_products("fast") if fast else contextlib.nullcontext()

    def _as_dense(self, natural: tuple[Tensor, ...], memory: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients in the dtype and memory order of `dense`, for the fused kernel."""
        if self.has_stacked_layout:
            return natural
        parameters = self.dense
        size, memory = parameters[0].numel(), memory.flatten().view(parameters[0].dtype)
        result = tuple(
            memory[i * size : (i + 1) * size].as_strided(p.shape, p.stride())
            for i, p in enumerate(parameters)
        )
        torch._foreach_copy_(result, natural)
        return result

    def _stack_gradients(self, x: Tensor, flags: Flags) -> None:
        """Writes the gradients, with coupled weight decay and with momentum where that comes first,
        to x (B, D0, kernel ..., D1)."""
        if not self.is_divided:
            self._copy_gradients(_as_parameters(x), flags)
            return
        first = self.parameters[0]
        rows = x.new_empty(len(first), len(x), *x.shape[2:])  # (rows, B, kernel ..., D1)
        self._copy_gradients(_as_parameters(rows.movedim(0, 1)), flags)
        x.copy_(self.exchange.whole(first, rows).movedim(0, 1))  # one collective for all tensors

    def _copy_gradients(self, stacked: tuple[Tensor, ...], flags: Flags) -> None:
        """Likewise for this rank's rows, unscaled."""
        if self.momentum_first and not self.group["nesterov"]:
            torch._foreach_copy_(stacked, self.momenta)
            return
        gradients, parameters = self.gradients(), self.parameters
        decay = 0.0 if self.group["decoupled"] else self.group["weight_decay"]
        if (
            self.device.type == "cpu"
            and flags.grad_scale is None
            and self.dtype == parameters[0].dtype
        ):
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

    def _add_momenta(self, stacked: tuple[Tensor, ...]) -> None:
        """Nesterov's step ahead, where momentum comes first."""
        if self.momentum_first:
            torch._foreach_add_(stacked, self.momenta, alpha=self.group["momentum"])

    def descend(self, gradients: Sequence[Tensor], flags: Flags) -> None:
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
            flags,
            lr=group["lr"],
            momenta=[] if self.momentum_first else self.momenta,
            weight_decay=decay if of_kernel else 0.0,
            grad_scale=flags.grad_scale if self.is_plain else None,
        )
        self.write_views()

    def _fused_sgd(
        self,
        gradients: list[Tensor],
        flags: Flags,
        *,
        lr: float | Tensor,
        momenta: list[Tensor],
        weight_decay: float,
        grad_scale: Tensor | None,
    ) -> None:
        """PyTorch's fused kernel, which leaves all as it is where `found_inf`."""
        group = self.group
        torch._fused_sgd_(
            self.dense,
            gradients,
            momenta,
            weight_decay=weight_decay,
            momentum=group["momentum"] if momenta else 0.0,
            lr=lr,
            dampening=group["dampening"] if self.step else 0.0,  # as in SGD: b = g at first
            nesterov=bool(group["nesterov"] and momenta),
            maximize=False,
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=flags.found_inf,
        )


class AdamParameters(Parameters):
    """Parameters of any shapes that NGD gives no natural gradients: embeddings, norms and biases.
    They take the steps of AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization"
    (2019), arXiv:1711.05101), with the group's `lr` and `weight_decay`.

    Their state is that of torch.optim.AdamW: `exp_avg` and `exp_avg_sq`, of the parameter's shape
    and dtype, and `step`, a float32 tensor (), which does not count steps that were left out.
    """

    def __init__(self, group: dict, parameters: list[Tensor], state: dict):
        super().__init__(group, parameters)
        self.moments = [self.buffers(state, name) for name in ("exp_avg", "exp_avg_sq")]
        for parameter in parameters:
            if "step" not in state[parameter]:
                state[parameter]["step"] = torch.zeros((), device=self.device)
            step = state[parameter]["step"].to(self.device, torch.float32, non_blocking=True)
            state[parameter]["step"] = step
        self.steps = [state[parameter]["step"] for parameter in parameters]

    def is_of(self, state: dict) -> bool:
        """Whether `state` still holds these tensors; it does not after loading a state."""
        return all(
            state[parameter].get("exp_avg") is own
            for parameter, own in zip(self.parameters, self.moments[0], strict=True)
        )

    def step_(self, flags: Flags) -> None:
        group = self.group
        kernel = torch._fused_adamw_ if group["decoupled"] else torch._fused_adam_
        torch._foreach_add_(self.steps, 1)
        kernel(
            self.dense,
            self.make_dense(self.gradients()),
            *self.moments,
            [],
            self.steps,
            lr=group["lr"],
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=flags.grad_scale,
            found_inf=flags.found_inf,
        )
        if flags.found_inf is not None:
            torch._foreach_sub_(self.steps, [flags.found_inf] * len(self.steps))
        self.write_views()


def _as_parameters(stacked: Tensor) -> tuple[Tensor, ...]:
    """(B, D0, kernel ..., D1) -> B views (D0, D1, kernel ...)"""
    return (stacked.movedim(-1, 2) if stacked.ndim > 3 else stacked).unbind()


def fixed_norm(shape: torch.Size) -> float:
    """The norm of a step with norm "fixed", before the learning rate."""
    return FIXED_RMS * math.sqrt(shape.numel())


def is_plain(shape: torch.Size, group: dict) -> bool:
    """Whether the gradient is used unchanged: SGD with momentum."""
    return group["norm"] == "gradient" and not axes_of(shape, "all")


def axes_of(shape: torch.Size, which: str) -> list[int]:
    """The axes that have a Fisher matrix; none if only one axis is longer than 1."""
    long = [number for number, length in enumerate(shape) if length > 1]
    if len(long) < 2 or shape.numel() == 0:
        return []
    return long if which == "all" else [number for number in long if number < 2]


def kind_of(parameter: Tensor) -> dict:
    """dtype and device of a parameter's Fisher matrices."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return {"dtype": dtype, "device": parameter.device}
