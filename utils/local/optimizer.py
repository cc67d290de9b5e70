"""Local steps in anyone's training loop: an optimizer whose workers average their parameters,
and DiLoCo's outer optimizer.

Sources: Gu, Lyu, Arora, Zhang and Huang, "A Quadratic Synchronization Rule for Distributed Deep
Learning" (2024), arXiv:2310.14423; its repository hmgxr128/QSR has a `LocalOptimizer` with the same
keywords; Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(2023), arXiv:2311.08105, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..exchange import Exchange
from ..place import resolve
from .rules import cut, power_length


@torch.no_grad()
def average_(tensors: Iterable[Tensor], exchange: Exchange) -> None:
    """Overwrites floating-point tensors with their means over the ranks, by one collective for each
    dtype (and device). All ranks have tensors of the same shapes, in the same order. Needs memory
    for three copies of the tensors while it works."""
    alike: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        mean = exchange.mean(torch.cat([tensor.reshape(-1) for tensor in group]))
        parts = mean.split([tensor.numel() for tensor in group])
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)]
        torch._foreach_copy_(group, shaped)


class LocalOptimizer(Optimizer):
    """Steps `optim` on this worker alone; after every h steps all workers average their parameters.

        h = max(1, min(max(min_h, floor((alpha / lr) ** power)), steps left))

    with `lr` the learning rate of the round's first step, in the first parameter group. It must be
    the same on all workers. Rounds that begin in the warm-up, and all rounds if alpha is 0, have
    `init_h` steps. The last round ends with step `total_steps`; after it the workers average in
    every step.

    Parameters are averaged whether or not they have a gradient. The optimizer's state stays with
    its worker, but for the fields that are named; so do buffers, such as BatchNorm's statistics.
    The workers must start with equal parameters, and take equally many steps. One that leaves out a
    step of its own, as a gradient scaler does, calls `count_step` in place of `step`.

    In one process the steps are those of `optim`, to the bit.

    Args:
        optim: any optimizer whose parameters are whole on every worker. Its parameter groups and
            state are also this optimizer's.
        warmup_steps: of the learning rate.
        total_steps: of the run.
        alpha: in units of the learning rate; 0: constant rounds of `init_h`. See `default_alpha`
            in utils/local/rules.py.
        power: 2 is the paper's rule.
        min_h: H_base, steps.
        init_h: steps of a round that begins in the warm-up; the paper takes `min_h`.
        step_ctr: steps that were taken already.
        optim_fields_to_average: keys of the optimizer's state, such as "exp_avg", whose tensors
            have their parameter's shape. A parameter that has no such state yet counts as zeros.
        exchange: with the other workers; None: with those of torch.distributed's default group, by
            the end of the first round, or with nobody in a process alone.
        outer: DiLoCo's outer optimizer, over the same parameters; only with alpha 0.

    Attributes:
        h: steps of this round.
        step_ctr: steps that were taken.
        local_step_cnt: those of this round.

    Raises:
        ValueError: a value is outside its range; alpha with an outer optimizer.
    """

    # Optimizer.__init__ is not called, since it would make groups and state of its own;
    # __setstate__ makes only the hooks.
    def __init__(
        self,
        optim: Optimizer,
        warmup_steps: int,
        total_steps: int,
        alpha: float = 0.0,
        power: float = 2,
        min_h: int = 1,
        init_h: int = 1,
        step_ctr: int = 0,
        optim_fields_to_average: Iterable[str] | None = None,
        *,
        exchange: Exchange | None = None,
        outer: OuterOptimizer | None = None,
    ):
        if min(total_steps, power, min_h, init_h) < 1:
            raise ValueError("total_steps, power, min_h and init_h are 1 or more")
        if not (min(warmup_steps, step_ctr) >= 0 and alpha >= 0):
            raise ValueError("warmup_steps, step_ctr and alpha are 0 or more")
        if alpha and outer is not None:
            raise ValueError(
                "an outer optimizer needs rounds of one length: leave out alpha, or the outer "
                "optimizer"
            )
        self.optim, self.exchange, self.outer = optim, exchange, outer
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.alpha, self.power, self.min_h, self.init_h = alpha, power, min_h, init_h
        self.optim_fields_to_average = list(optim_fields_to_average or [])
        self.step_ctr, self.local_step_cnt = step_ctr, 0
        self.__setstate__({})
        self.adjust_h()

    def __getstate__(self) -> dict:
        """For pickle and deepcopy; without hooks, as in any optimizer."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def adjust_h(self) -> None:
        """Sets h from the learning rate as it stands; without effect inside a round.

        `count_step` also does it at the first step of a round, so a call is needed only to know h
        before that step.
        """
        if self.local_step_cnt:
            return
        left = self.total_steps - self.step_ctr
        if self.step_ctr < self.warmup_steps or self.alpha == 0:
            self.h = cut(self.init_h, left)
        else:
            lr = float(self.param_groups[0]["lr"])
            self.h = power_length(lr, left, alpha=self.alpha, base=self.min_h, power=self.power)

    def get_local_step(self) -> int:
        """h, under the repository's name."""
        return self.h

    def step(self, closure=None) -> bool:
        """Steps `optim`, and averages at the end of a round; returns whether it has.

        Raises:
            ValueError: an averaged field is not in the optimizer's state, or not a tensor of its
                parameter's shape.
            RuntimeError: there are other processes, and no process group.
        """
        self.optim.step(closure)
        return self.count_step()

    def count_step(self) -> bool:
        """`step` without that of `optim`: for a step that was taken already, or left out."""
        self.adjust_h()
        self.step_ctr += 1
        self.local_step_cnt += 1
        if self.local_step_cnt < self.h:
            return False
        self.local_step_cnt = 0
        if self.exchange is None:
            # By name: only that package knows torch.distributed, and this one is below it.
            self.exchange = resolve("utils.distributed.exchange:default_exchange")()
        if self.exchange.size > 1:
            average_(self._averaged_tensors(), self.exchange)
        if self.outer is not None:
            self.outer.step()
        return True

    def _averaged_tensors(self) -> list[Tensor]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = [self.state.get(p, {}) for p in parameters]
        known = {name for state in states for name in state}
        tensors = [p.detach() for p in parameters]
        for field in self.optim_fields_to_average:
            if known and field not in known:
                raise ValueError(
                    f"the optimizer's state has no {field!r} to average; it has {sorted(known)}"
                )
            for p, state in zip(parameters, states, strict=True):
                value = state.get(field)
                value = torch.zeros_like(p) if value is None else value
                if not isinstance(value, Tensor) or value.shape != p.shape:
                    raise ValueError(f"{field!r} is not a tensor of its parameter's shape")
                tensors.append(value)
        return tensors

    # ---- as any optimizer -----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict]:
        return self.optim.param_groups

    @property
    def defaults(self) -> dict:
        return self.optim.defaults

    @property
    def state(self) -> dict:
        return self.optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict:
        """That of `optim`, with this worker's place in the round. Inside a round every worker has
        to save its own, together with its own parameters."""
        place = {"h": self.h, "step_ctr": self.step_ctr, "local_step_cnt": self.local_step_cnt}
        outer = {} if self.outer is None else {"outer": self.outer.state_dict()}
        return self.optim.state_dict() | place | outer

    def load_state_dict(self, state_dict: dict) -> None:
        """Of this class, or of a plain optimizer, which leaves the counters as they are.

        Raises:
            ValueError: the state was saved with an outer optimizer, and this one has none, or the
                other way round.
        """
        state = dict(state_dict)
        place = {name: state.pop(name, None) for name in ("h", "step_ctr", "local_step_cnt")}
        outer = state.pop("outer", None)
        if place["step_ctr"] is not None:
            if (outer is None) != (self.outer is None):
                raise ValueError("the state was saved with an outer optimizer, or this one has one")
            self.h, self.step_ctr = place["h"], place["step_ctr"]
            # The paper's repository saves only after an averaging.
            self.local_step_cnt = place["local_step_cnt"] or 0
        self.optim.load_state_dict(state)
        if outer is not None and self.outer is not None:
            self.outer.load_state_dict(outer)


class OuterOptimizer:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum, once in a round, along the difference
    that the workers' mean has made, as in torch.optim.SGD:

        d = before - now                    the difference, in place of a gradient
        m = momentum * m + d
        before = before - lr * (d + momentum * m)

    `before` is where the round began, `now` the mean of the workers' parameters at its end. All
    workers make the same step, without communication. With lr 1 and momentum 0 the result is the
    mean, but for rounding.

    It is not to be combined with rounds that grow as the learning rate falls (qsr): the momentum
    would add differences of rounds of different lengths.

    Args:
        parameters: those that are averaged; equal on all workers now. Copied once, and once more
            for the momentum.
        lr, momentum: the paper's by default.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.7, momentum: float = 0.9):
        if not (lr > 0 and 0 <= momentum < 1):
            raise ValueError(f"lr is above 0, momentum in [0, 1); not {lr}, {momentum}")
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self.before = [p.detach().clone() for p in self.parameters]
        self.buffers = [torch.zeros_like(p) for p in self.before]

    @torch.no_grad()
    def step(self) -> None:
        """To be called when the parameters hold the mean; they then hold the result."""
        differences = torch._foreach_sub(self.before, [p.detach() for p in self.parameters])
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, differences)
        torch._foreach_add_(differences, self.buffers, alpha=self.momentum)
        torch._foreach_add_(self.before, differences, alpha=-self.lr)
        torch._foreach_copy_(self.parameters, self.before)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The tensors themselves, not copies; equal on all workers."""
        return {"before": list(self.before), "buffers": list(self.buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Raises ValueError if the state is of other parameters; nothing is changed then."""
        shapes = [p.shape for p in self.parameters]
        if any([t.shape for t in state[name]] != shapes for name in ("before", "buffers")):
            raise ValueError("the outer optimizer's state is of other parameters")
        torch._foreach_copy_(self.before, state["before"])
        torch._foreach_copy_(self.buffers, state["buffers"])
