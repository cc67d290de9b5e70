"""AdamW for the parameters that NGD gives no natural gradients: embeddings, norms and biases.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), arXiv:1711.05101.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.optim.multi_tensor import Flags, Parameters

BETAS, EPSILON = (0.9, 0.999), 1e-8  # PyTorch's


class AdamParameters(Parameters):
    """Parameters of any shapes that take Adam's steps, with the group's `lr` and `weight_decay`.

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
