"""LAMB and NovoGrad as optimizers (see lamb.py, novograd.py), which need norms of whole parameters.

On a GPU a step launches a few kernels for all parameters, and the host never waits for the device.
"""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from ..exchange import Exchange
from .multi_tensor import (
    Flags,
    MultiTensor,
    Parameters,
    add_step,
    flat_gradients,
    flat_like,
    unless_left_out,
)


def count_step(group: dict, device: torch.device, flags: Flags) -> None:
    """Counts a step of the group on the device, unless the step is left out."""
    step = group.get("step", 0)
    if not isinstance(step, Tensor):  # none yet, or from a checkpoint
        step = torch.full((), float(step), device=device)
    group["step"] = step
    add_step(step, flags)


class WithNorms(Parameters):
    """Parameters of one group. Their steps lie in one flat tensor, sorted by size, so that one
    kernel scales all parameters of a size. Norms are of whole parameters, where these are sharded
    over the ranks. `counts`: these include the group's first parameter with a gradient, so they
    count the group's steps."""

    def __init__(self, group: dict, parameters: list[Tensor], exchange: Exchange):
        order = sorted(range(len(parameters)), key=lambda i: parameters[i].numel())
        super().__init__(group, [parameters[i] for i in order])
        self.exchange = exchange
        self.counts = parameters[0] is next(p for p in group["params"] if p.grad is not None)
        self.sizes = [
            (numel, len(list(same)))
            for numel, same in groupby(self.parameters, key=lambda p: p.numel())
        ]
        # Squared norms are summed over the ranks in the order of the group: by size each rank may
        # have another. Those of parameters that are not sharded count once, on rank 0.
        divided = [exchange.is_divided(p) for p in parameters]
        self.is_sharded = any(divided)
        counted = [one or exchange.rank == 0 for one in divided]
        self.counted = torch.tensor(counted, device=self.device)
        self.by_size = torch.tensor(order, device=self.device)
        self.by_group = self.by_size.argsort()

    def norms(self, *lists: list[Tensor]) -> tuple[Tensor, ...]:
        """The norm of each tensor, (n,) for each list; of whole parameters. Collective if any of
        them is sharded."""
        norms = [torch.stack(torch._foreach_norm(tensors)) for tensors in lists]
        if not self.is_sharded:
            return tuple(norms)
        squares = torch.stack(norms).square()[:, self.by_group]
        squares = self.exchange.sum(torch.where(self.counted, squares, 0.0))
        return squares.sqrt()[:, self.by_size].unbind()

    def scale_(self, flat: Tensor, scale: Tensor) -> None:
        """Multiplies each parameter's part of `flat` (see `flat_like`) by its `scale`, (n,)."""
        start = first = 0
        for numel, count in self.sizes:
            same = flat[start : start + numel * count].view(count, numel)
            same.mul_(scale[first : first + count, None])
            start, first = start + numel * count, first + count


def trust_ratios(weight_norms: Tensor, step_norms: Tensor) -> Tensor:
    """|w| / |u| of each parameter, 1 where either is 0. All (n,)."""
    no_ratio = torch.minimum(weight_norms, step_norms) <= 0
    return (weight_norms / step_norms).masked_fill_(no_ratio, 1.0)


class Lamb(MultiTensor):
    """See lamb.py and `MultiTensor`.

    State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape. Each group counts its steps in
    `step`, a float32 tensor () on the device, without those that were left out; parameters that
    join a group later (--unfreeze_epoch) begin with the bias correction of that step.
    A group with weight decay 0 takes Adam's steps.
    """

    DEFAULTS: ClassVar[dict] = {
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "bias_correction": True,
    }

    def prepare(self, group: dict, parameters: list[Tensor]) -> list[Parameters]:
        return [LambParameters(group, parameters, self.state, self.exchange)]


class LambParameters(WithNorms):
    def __init__(self, group: dict, parameters: list[Tensor], state: dict, exchange: Exchange):
        super().__init__(group, parameters, exchange)
        self.moments = [self.buffers(state, name) for name in ("exp_avg", "exp_avg_sq")]
        self.endless = torch.full((), torch.inf, device=self.device)

    def step_(self, flags: Flags) -> None:
        group, gradients = self.group, self.make_dense(self.gradients())
        if self.counts:
            count_step(group, self.device, flags)
        lr, decay = group["lr"], group["weight_decay"]
        if not decay:
            self._adam(self.dense, gradients, lr, flags)
            self.write_views()
            return
        flat, steps = flat_like(self.dense)
        flat.zero_()
        self._adam(steps, gradients, 1.0, flags)  # now -m' / (sqrt(v') + eps); 0 if left out
        torch._foreach_add_(steps, self.dense, alpha=-decay)  # now -u
        scale = lr * trust_ratios(*self.norms(self.dense, steps))
        if flags.left_out is not None:
            scale.masked_fill_(flags.left_out, 0.0)
        self.scale_(flat, scale)
        torch._foreach_add_(self.dense, steps)
        self.write_views()

    def _adam(self, targets: list[Tensor], gradients: list[Tensor], lr, flags: Flags) -> None:
        """Adds Adam's steps with learning rate `lr` to the targets."""
        # An endless count of steps: no bias correction.
        count = self.group["step"] if self.group["bias_correction"] else self.endless
        count = count.to(self.device, non_blocking=True)
        beta1, beta2 = self.group["betas"]
        torch._fused_adam_(
            targets,
            gradients,
            *self.moments,
            [],
            [count] * len(targets),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=self.group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=flags.grad_scale,
            found_inf=flags.found_inf,
        )


class NovoGrad(MultiTensor):
    """See novograd.py and `MultiTensor`.

    State of a parameter: `exp_avg`, of its shape, and `gradient_norm`, (), 0 before its first step.
    Each group counts its steps in `step`, a float32 tensor () on the device, without those that
    were left out; parameters that join a group later begin with the bias correction of that step.
    """

    DEFAULTS: ClassVar[dict] = {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}

    def prepare(self, group: dict, parameters: list[Tensor]) -> list[Parameters]:
        return [NovoGradParameters(group, parameters, self.state, self.exchange)]


class NovoGradParameters(WithNorms):
    """Parameters of one group. Their averaged norms lie in one tensor `v`, (n,), of which the state
    of each has its part."""

    def __init__(self, group: dict, parameters: list[Tensor], state: dict, exchange: Exchange):
        super().__init__(group, parameters, exchange)
        self.m = self.buffers(state, "exp_avg")
        zero = torch.zeros((), dtype=parameters[0].dtype, device=self.device)
        self.v = torch.stack([state[p].get("gradient_norm", zero) for p in self.parameters])
        for parameter, norm in zip(self.parameters, self.v, strict=True):
            state[parameter]["gradient_norm"] = norm

    def step_(self, flags: Flags) -> None:
        group, gradients, like = self.group, self.make_dense(self.gradients()), self.dense[0]
        if self.counts:
            count_step(group, self.device, flags)
        step = group["step"].to(self.device, non_blocking=True).double()
        beta1, beta2 = group["betas"]
        self._average_norms(gradients, beta2, flags)
        flat, parts = flat_gradients(gradients, self.dense, flags)
        torch._foreach_mul_(self.m, unless_left_out(beta1, 1.0, flags, like))
        torch._foreach_add_(self.m, parts, alpha=1 - beta1)
        torch._foreach_copy_(parts, self.m)
        correction = 1 - beta1**step
        v = self.v / (1 - beta2**step).sqrt() + group["eps"]
        self.scale_(flat, (1 / (v * correction)).to(like.dtype))
        if group["weight_decay"]:
            torch._foreach_add_(parts, self.dense, alpha=group["weight_decay"])
        flat.mul_(-group["lr"])
        if flags.left_out is not None:
            flat.masked_fill_(flags.left_out, 0.0)
        torch._foreach_add_(self.dense, parts)
        self.write_views()

    def _average_norms(self, gradients: list[Tensor], beta2: float, flags: Flags) -> None:
        (norms,) = self.norms(gradients)
        averaged = (beta2 * self.v.square() + (1 - beta2) * norms.square()).sqrt()
        v = torch.where(self.v == 0, norms, averaged)
        self.v.copy_(v if flags.left_out is None else torch.where(flags.left_out, self.v, v))
