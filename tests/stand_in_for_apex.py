"""A stand-in for Apex: its classes, with its state and in plain PyTorch, for machines without it.

As Apex's they know nothing of `found_inf`, and count steps on the host, in the group.
"""

import sys
from types import ModuleType

import torch

MADE = []  # every optimizer that was made, with the arguments of its class


class _Plain(torch.optim.Optimizer):
    def __init__(self, params, **defaults):
        super().__init__(params, {"weight_decay": 0.0} | defaults)
        MADE.append((self, defaults))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            assert isinstance(group["step"], int)  # as the kernels take it
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def direction(self, p, g, state, group):
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        (beta1, beta2), t = group["betas"], group["step"]
        m = state["exp_avg"].mul_(beta1).add_(g, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        return u + group["weight_decay"] * p


class FusedAdam(_Plain):
    def update(self, p, g, state, group):
        p.sub_(group["lr"] * self.direction(p, g, state, group))


class FusedLAMB(_Plain):
    def update(self, p, g, state, group):
        u = self.direction(p, g, state, group)
        scaled = group["weight_decay"] and p.norm() > 0 and u.norm() > 0
        p.sub_(group["lr"] * (p.norm() / u.norm() if scaled else 1.0) * u)


class FusedSGD(_Plain):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            del group["step"]  # Apex counts none here

    def update(self, p, g, state, group):
        g = g + group["weight_decay"] * p
        if group["momentum"]:
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.mul_(group["momentum"]).add_(g)
            g = g + group["momentum"] * buffer if group["nesterov"] else buffer
        p.sub_(group["lr"] * g)


def modules() -> dict[str, ModuleType]:
    """What `import` finds of it, by name."""
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedLAMB = FusedAdam, FusedLAMB
    optimizers.FusedSGD = FusedSGD
    apex.optimizers = optimizers
    return {"apex": apex, "apex.optimizers": optimizers, "amp_C": ModuleType("amp_C")}


def install(patch) -> None:
    """Makes it importable, and lets it take weights on the CPU, while `patch` (a MonkeyPatch)
    lasts."""
    from utils.optim import apex

    for name, module in modules().items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(apex, "on_gpu", lambda parameter: True)
    apex.classes.cache_clear()
    MADE.clear()
