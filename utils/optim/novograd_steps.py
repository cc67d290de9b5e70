"""NovoGrad as an optimizer (see novograd.py): on a GPU a step launches a few kernels for all
parameters, and the host never waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.optim.multi_tensor import MultiTensor, flat_gradients, unless_left_out
from utils.optim.parameters import Flags, Parameters
from utils.optim.whole_norms import WithNorms, count_step


class NovoGrad(MultiTensor):
    """See novograd.py and `MultiTensor`.

    State of a parameter: `exp_avg`, of its shape, and `gradient_norm`, (), 0 before its first step.
    Each group counts its steps in `step`, a float32 tensor () on the device, without those that
    were left out; parameters that join a group later begin with the bias correction of that step.

    Args:
        params: parameters or groups with `weight_decay`.
        lr: learning rate.
        weight_decay: default of the groups.
        betas, eps: see novograd.py.
        exchange: with the other ranks, where parameters are sharded; norms are of whole parameters.
    """

    def __init__(
        self,
        params,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        exchange: Exchange | None = None,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, defaults, exchange)

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
