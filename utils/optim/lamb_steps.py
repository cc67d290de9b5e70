"""LAMB as an optimizer (see lamb.py): on a GPU a step launches a few kernels for all parameters,
and the host never waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.optim.multi_tensor import MultiTensor, flat_like
from utils.optim.parameters import Flags, Parameters
from utils.optim.whole_norms import WithNorms, count_step


def trust_ratios(weight_norms: Tensor, step_norms: Tensor) -> Tensor:
    """|w| / |u| of each parameter, 1 where either is 0. All (n,)."""
    no_ratio = torch.minimum(weight_norms, step_norms) <= 0
    return (weight_norms / step_norms).masked_fill_(no_ratio, 1.0)


class Lamb(MultiTensor):
    """See lamb.py and `MultiTensor`.

    State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape. Each group counts its steps in
    `step`, a float32 tensor () on the device, without those that were left out; parameters that
    join a group later (--unfreeze_epoch) begin with the bias correction of that step.

    Args:
        params: parameters or groups with `weight_decay`.
        lr: learning rate.
        weight_decay: default of the groups; with 0 a group takes Adam's steps.
        betas, eps: see lamb.py.
        bias_correction: of the moments.
        exchange: with the other ranks, where parameters are sharded; norms are of whole parameters.
    """

    def __init__(
        self,
        params,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        bias_correction: bool = True,
        exchange: Exchange | None = None,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, exchange)

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
