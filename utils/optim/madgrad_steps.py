"""MADGRAD as an optimizer (see madgrad.py): on a GPU a step launches a few kernels for all
parameters, and the host never waits for the device."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .multi_tensor import (
    Flags,
    MultiTensor,
    Parameters,
    add_step,
    by_steps,
    flat_gradients,
    flat_like,
    unless_left_out,
)

EPSILON = 1e-6


class Madgrad(MultiTensor):
    """See madgrad.py and `MultiTensor`.

    State of a parameter: `s` and `grad_sum_sq`, and with momentum `x0`, of its shape; `step`, a
    float32 tensor () that parameters share, without the steps that were left out. A step takes as
    much memory as the weights.
    """

    DEFAULTS: ClassVar[dict] = {"momentum": 0.9, "weight_decay": 0.0}

    def prepare(self, group: dict, parameters: list[Tensor]) -> list[Parameters]:
        cohorts = by_steps(parameters, self.state)
        return [MadgradParameters(group, cohort, self.state) for cohort in cohorts]


class MadgradParameters(Parameters):
    """Parameters of one group that have taken equally many steps."""

    def __init__(self, group: dict, parameters: list[Tensor], state: dict):
        super().__init__(group, parameters)
        self.s, self.v = (self.buffers(state, name) for name in ("s", "grad_sum_sq"))
        self.step = state[parameters[0]]["step"]
        self.start: list[Tensor] = []
        if group["momentum"]:
            if any("x0" not in state[parameter] for parameter in parameters):
                for parameter, start in zip(parameters, self._starts(), strict=True):
                    state[parameter].setdefault("x0", start.clone())
            self.start = self.buffers(state, "x0")

    def step_(self, flags: Flags) -> None:
        group, parameters, like = self.group, self.dense, self.dense[0]
        momentum, gradients = group["momentum"], self.make_dense(self.gradients())
        start = self.start or self._starts()
        add_step(self.step, flags)
        # The scale of g and of g^2 in their sums, in two halves, so that both take one buffer.
        root = (self.step.double().sqrt() * (group["lr"] + EPSILON)).sqrt().to(like.dtype)
        flat, parts = flat_gradients(gradients, parameters, flags, group["weight_decay"])
        flat.mul_(root)
        torch._foreach_addcmul_(self.v, parts, parts)
        flat.mul_(root)
        torch._foreach_add_(self.s, parts)
        self._write_distances(flat, parts)
        torch._foreach_sub_(parts, start)  # now -z
        flat.mul_(unless_left_out(momentum - 1, 0.0, flags, like))
        torch._foreach_mul_(parameters, unless_left_out(momentum, 1.0, flags, like))
        torch._foreach_add_(parameters, parts)
        self.write_views()

    def _write_distances(self, flat: Tensor, parts: list[Tensor]) -> None:
        """s / (cbrt(v) + eps) for each parameter: how far z is from where it started."""
        torch._foreach_copy_(parts, self.v)
        flat.pow_(1 / 3).add_(EPSILON).reciprocal_()
        torch._foreach_mul_(parts, self.s)

    def _starts(self) -> list[Tensor]:
        """Where parameters that had no momentum so far have started."""
        flat, parts = flat_like(self.dense)
        self._write_distances(flat, parts)
        torch._foreach_add_(parts, self.dense)
        return parts
