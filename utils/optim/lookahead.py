"""Lookahead: slow weights that follow those of any optimizer every few steps.

timm's Lookahead cannot be used here: its slow weights start as a copy of the fast ones at the first
synchronisation, which therefore has no effect, and it does not pass `found_inf` on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from .found_inf import is_on_host

SLOW, COUNT = "slow_weight", "lookahead_step"  # keys in the state, and in the parameter groups


class Lookahead(Optimizer):
    """After every k steps of `optimizer`, its weights p and the slow weights s both become
    s + alpha (p - s). The slow weights start as the initial weights.

    Source: Zhang, Lucas, Hinton and Ba, "Lookahead Optimizer: k steps forward, 1 step back"
    (2019), arXiv:1907.08610, algorithm 1.

    The state is that of `optimizer` plus the slow weights. The parameter groups are those of
    `optimizer`; they also hold the step count. Honours `found_inf` if `optimizer` does. (On a GPU
    skipped steps count, too, since the host does not know of them.)

    Args:
        optimizer: must honour `found_inf` if that is ever set.
        k: steps between two synchronisations, 1 or more.
        alpha: how far the slow weights move, in (0, 1]; 1 is the same as `optimizer` alone.

    Hooks on saving and loading are not called: register them at `optimizer`.
    """

    found_inf: Tensor | None = None

    # Optimizer.__init__ is not called, since it would make groups and state of its own;
    # __setstate__ makes only the hooks.
    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5):
        if k < 1 or not 0 < alpha <= 1:
            raise ValueError(f"Lookahead takes k of 1 or more, alpha in (0, 1]; not {k}, {alpha}")
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self._slow = {p: p.detach().clone() for p in self._parameters()}
        self._count(0)
        self.__setstate__({})

    def __getstate__(self) -> dict:
        """For pickle and deepcopy; without hooks, as in any optimizer."""
        return {name: getattr(self, name) for name in ("optimizer", "k", "alpha", "_slow")}

    @torch.no_grad()
    def step(self, closure=None):
        flag = self.optimizer.found_inf = self.found_inf
        loss = self.optimizer.step(closure)
        if flag is not None and is_on_host(flag):
            if flag:
                return loss
            flag = None
        self._count(self.param_groups[0][COUNT] + 1)
        if self.param_groups[0][COUNT] % self.k == 0:
            self._synchronize(flag)
        return loss

    def _synchronize(self, flag: Tensor | None) -> None:
        """`flag`: not 0 if the step was left out; None: it was taken."""
        fast, slow = list(self._slow), list(self._slow.values())
        new = torch._foreach_lerp(slow, fast, self.alpha)
        if flag is None:
            torch._foreach_copy_(slow, new)
            torch._foreach_copy_(fast, new)
            return
        left_out = flag > 0
        for p, s, value in zip(fast, slow, new, strict=True):
            torch.where(left_out, s, value, out=s)
            p.copy_(torch.where(left_out, p, value))

    def _count(self, steps: int) -> None:
        for group in self.param_groups:
            group[COUNT] = steps

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict:
        return self.optimizer.defaults

    @property
    def state(self) -> dict:
        """Of each parameter. Read-only: changes to the dictionary are lost."""
        own = self.optimizer.state
        return {p: {**own.get(p, {}), SLOW: slow} for p, slow in self._slow.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict) -> None:
        self.optimizer.add_param_group(param_group)
        self._slow |= {p: p.detach().clone() for p in self.param_groups[-1]["params"]}
        self._count(self.param_groups[0][COUNT])

    def state_dict(self) -> dict:
        saved = self.optimizer.state_dict()
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        state = {key: dict(saved["state"].get(key, {})) for key in keys}
        for key, parameter in zip(keys, self._parameters(), strict=True):
            state[key][SLOW] = self._slow[parameter]
        return saved | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Raises KeyError if the state has no slow weights."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        slow = [state_dict["state"][key][SLOW] for key in keys]
        state = {
            key: {name: value for name, value in values.items() if name != SLOW}
            for key, values in state_dict["state"].items()
        }
        # An optimizer that has no state for a parameter yet must not find an empty one.
        state = {key: values for key, values in state.items() if values}
        self.optimizer.load_state_dict(state_dict | {"state": state})
        for parameter, value in zip(self._parameters(), slow, strict=True):
            self._slow[parameter].copy_(value)
