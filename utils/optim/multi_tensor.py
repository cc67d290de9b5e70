"""What optimizers share that step all parameters of a group at once, by `torch._foreach_*`: on a
GPU such a step launches a few kernels, and the host never waits for the device."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.optim.parameters import Flags, Parameters


class MultiTensor(torch.optim.Optimizer):
    """Honours `found_inf` by selection on the device, and can be captured in a CUDA graph.

    A subclass says in `prepare` which parameters are stepped together.

    Args:
        params: parameters or groups.
        defaults: settings of the groups.
        exchange: with the other ranks, where parameters are sharded. A copy by pickle or deepcopy
            is for a single process.
    """

    found_inf: Tensor | None = None
    exchange = Exchange()

    def __init__(self, params, defaults: dict, exchange: Exchange | None = None):
        self._prepared: dict[int, tuple[dict, list[Tensor], list[Parameters]]] = {}
        if exchange is not None:
            self.exchange = exchange
        super().__init__(params, defaults)

    def __setstate__(self, state: dict) -> None:
        """Also called by `load_state_dict`."""
        super().__setstate__(state)
        self._prepared = {}

    def prepare(self, group: dict, parameters: list[Tensor]) -> list[Parameters]:
        """Splits parameters of a group, all of one device and dtype, into those that one `step_`
        takes together, and makes their state. Each result has a method `step_(flags)`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        """One step. `closure`, if given, computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flags: dict[torch.device, Flags] = {}
        for number, group in enumerate(self.param_groups):
            for parameters in self._prepared_of(number, group):
                device = parameters.device
                if device not in flags:
                    flags[device] = Flags.of(self, device)
                parameters.step_(flags[device])  # type: ignore[attr-defined]  # see `prepare`
        return loss

    def _prepared_of(self, number: int, group: dict) -> list[Parameters]:
        """Prepared once, and again when other parameters have gradients."""
        present = [p for p in group["params"] if p.grad is not None]
        of, before, prepared = self._prepared.get(number, (None, [], []))
        same = group is of and len(present) == len(before)
        if not same or not all(map(operator.is_, present, before)):
            kinds: dict[tuple, list[Tensor]] = {}  # a kernel takes one device and dtype
            for parameter in present:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            prepared = [one for kind in kinds.values() for one in self.prepare(group, kind)]
            self._prepared[number] = group, present, prepared
        return prepared


def by_steps(parameters: list[Tensor], state: dict) -> list[list[Tensor]]:
    """Parameters that have taken equally many steps. From here on they share one tensor as their
    state `step`, float32 () on their device, which `add_step` changes."""
    same: dict[object, tuple[Tensor, list[Tensor]]] = {}
    for parameter in parameters:
        step = state[parameter].get("step", 0)
        on_gpu = isinstance(step, Tensor) and step.is_cuda  # shared, and reading it would wait
        key = id(step) if on_gpu else float(step)
        if key not in same:
            # Not the tensor itself, which parameters that have no gradient now may share.
            own = step.clone() if on_gpu else torch.full((), key, device=parameter.device)
            same[key] = own, []
        same[key][1].append(parameter)
    for step, members in same.values():
        for parameter in members:
            state[parameter]["step"] = step
    return [members for _, members in same.values()]


def add_step(step: Tensor, flags: Flags) -> None:
    """Adds 1, unless the step is left out."""
    step.add_(1 if flags.found_inf is None else 1 - flags.found_inf)


def unless_left_out(value: float | Tensor, otherwise: float, flags: Flags, like: Tensor):
    """`value`, or `otherwise` where the step is left out; a number or a tensor () as multi-tensor
    kernels take it for tensors `like` this one."""
    if isinstance(value, Tensor):
        value = value.to(like.dtype)
    if flags.found_inf is None:
        return value
    value = value if isinstance(value, Tensor) else like.new_full((), value)
    return value.masked_fill(flags.left_out, otherwise)


def flat_like(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A new flat tensor, and the part of it for each of these dense tensors, in its memory order.
    What a kernel does with the flat tensor it does with all of them."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    parts, start = [], 0
    for tensor in tensors:
        parts.append(flat.as_strided(tensor.shape, tensor.stride(), start))
        start += tensor.numel()
    return flat, parts


def flat_gradients(
    gradients: list[Tensor], parameters: list[Tensor], flags: Flags, decay: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """Gradients plus `decay` times the parameters, 0 where the step is left out: as `flat_like`."""
    flat, parts = flat_like(parameters)
    torch._foreach_copy_(parts, gradients)
    if decay:
        torch._foreach_add_(parts, parameters, alpha=decay)
    if flags.found_inf is not None:
        flat.masked_fill_(flags.left_out, 0.0)
    return flat, parts
