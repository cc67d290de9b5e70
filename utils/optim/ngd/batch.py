"""Parameters that NGD updates together, and their state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...exchange import Exchange
from ..multi_tensor import Flags, Parameters
from ..muon_steps import is_matrix
from .batched_fisher import AxisBatch
from .fisher import default_rank, zero_fisher

EARLY_UPDATES = 10  # the first steps all update the Fisher matrices, as in Kaldi
# Root mean square of a step with norm "fixed", before the learning rate. It is that of AdamW's
# steps, to which Muon's are scaled, too (Liu et al., "Muon is scalable for LLM training" (2025),
# arXiv:2502.16982, section 2.2).
FIXED_RMS = 0.2
ALIGNED = 64  # elements to whose multiple buffers are rounded up, as products of matrices like it
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW, PyTorch's


class Batch:
    """Parameters of one group, shape and step count, and their state; any shapes if `is_plain`.

    Stacked gradients have the shape (B, D0, kernel ..., D1), the memory order of a convolution's
    weight in channels_last: both large axes are then rows or columns of matrices, and nothing needs
    to be transposed. Where parameters are sharded over the ranks, the stacked gradients are those
    of whole parameters, while momentum and step cover this rank's rows.

    Attributes:
        is_orthogonal: whether their natural gradients are orthogonalised.
        lengths: of the axes, before the choice of those that have Fisher matrices.
        shape, shape_of_axes: of the stacked gradients, and with the axes as in `lengths`.
        has_stacked_layout: whether parameters have the memory order and dtype of the stacked
            gradients.
        sizes: elements of the two buffers that natural gradients take; 0 if `is_plain`.
    """

    def __init__(
        self, group: dict, parameters: list[Tensor], state: dict, step: int, exchange: Exchange
    ):
        first = parameters[0]
        self.group, self.parameters, self.device = group, parameters, first.device
        self.step, self.exchange = step, exchange
        self.of_one = exchange.shape(first)
        self.is_divided = exchange.is_divided(first)
        self.dtype = kind_of(first)["dtype"]
        self.lengths = lengths_of(self.of_one, group["axes"])
        self.axes = [self._axis(number, state) for number in axes_of(self.lengths, group["axes"])]
        self.is_plain = is_plain(self.of_one, group)
        is_orthogonal = group["orthogonal"] and len(self.lengths) == 2 and is_matrix(self.of_one)
        self.is_orthogonal = bool(is_orthogonal and self.axes)
        # (B, D0, kernel ..., D1), without the axes that do not exist
        self.shape, self.shape_of_axes = (
            torch.Size((len(parameters), *lengths[:1], *lengths[2:], *lengths[1:2]))
            for lengths in (self.of_one, self.lengths)
        )
        stacked = as_parameters(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        self.has_stacked_layout = all(
            one.stride() == p.stride() and one.dtype == p.dtype
            for one, p in zip(stacked, parameters, strict=True)
        )
        needs_second = not self.has_stacked_layout or any(axis.whole for axis in self.axes)
        size = 0 if self.is_plain else -(-self.shape.numel() // ALIGNED) * ALIGNED
        self.sizes = size, size * needs_second

    def _axis(self, number: int, state: dict) -> AxisBatch:
        """The Fisher matrices of an axis. The parameters' state is replaced by views of them."""
        first = self.parameters[0]
        length, kind = self.lengths[number], kind_of(first)
        fisher_rank = min(self.group["rank"] or default_rank(length), length - 1)
        stacked = {}
        for name, start in zero_fisher(fisher_rank, length, **kind).items():
            key = f"{name}_{number}"
            values = [state[parameter].get(key, start) for parameter in self.parameters]
            if any(value.shape != start.shape for value in values):
                raise RuntimeError(
                    f"NGD: the state is not of rank {fisher_rank}: "
                    "keep the group's `rank` and `axes`"
                )
            stacked[name] = torch.stack(values)
            for parameter, view in zip(self.parameters, stacked[name].unbind(), strict=True):
                state[parameter][key] = view
        dim = {0: 1, 1: len(self.lengths)}.get(number, number)
        settings = {name: self.group[name] for name in ("alpha", "eta", "power")}
        return AxisBatch(dim, **settings, **stacked)

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


def as_parameters(stacked: Tensor) -> tuple[Tensor, ...]:
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
    return [number for number in long if number < 2] if which == "channels" else long


def lengths_of(shape: torch.Size, which: str) -> torch.Size:
    """(D0, D1, kernel ...), with "kernel" as (D0, D1, elements of the kernel), with "patch" as (D0,
    elements of a kernel times D1)."""
    first = {"patch": 1, "kernel": 2}.get(which, len(shape))  # of the axes that become one
    return torch.Size((*shape[:first], shape[first:].numel())) if len(shape) > first else shape


def kind_of(parameter: Tensor) -> dict:
    """dtype and device of a parameter's Fisher matrices."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return {"dtype": dtype, "device": parameter.device}
