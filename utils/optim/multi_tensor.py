"""What optimizers share that step all parameters of a group at once, by PyTorch's fused kernels and
`torch._foreach_*`: on a GPU such a step launches a few kernels, and the host never waits for the
device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..exchange import Exchange


@dataclass
class Flags:
    """What the caller has set on the optimizer before the step, () tensors, or None: TrainStep sets
    `found_inf`, a GradScaler both."""

    found_inf: Tensor | None
    grad_scale: Tensor | None

    @staticmethod
    def of(optimizer, device: torch.device) -> Flags:
        found_inf = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
        return Flags(
            None if found_inf is None else found_inf.to(device, non_blocking=True),
            None if scale is None else scale.to(device, non_blocking=True),
        )

    @functools.cached_property
    def left_out(self) -> Tensor | None:
        """() bool: the step must change nothing."""
        return None if self.found_inf is None else self.found_inf > 0


class Parameters:
    """Parameters of one group, on one device.

    Attributes:
        views: indices of the parameters that do not `fit`.
        dense: the tensors that the kernels update: the parameters, or contiguous copies of those in
            `views`.
    """

    def __init__(self, group: dict, parameters: list[Tensor]):
        self.group, self.parameters, self.device = group, parameters, parameters[0].device
        self.views = [index for index, p in enumerate(parameters) if not self.fits(p)]
        self.dense = list(parameters)
        for index in self.views:
            self.dense[index] = parameters[index].clone(memory_format=torch.contiguous_format)

    def fits(self, parameter: Tensor) -> bool:
        """Whether the kernels take the parameter as it lies in memory: they assume dense tensors,
        and would overwrite the elements in between."""
        return is_dense(parameter)

    def buffers(self, state: dict, name: str) -> list[Tensor]:
        """The state `name` of each parameter, zero at first, in the memory order of `dense`."""
        for parameter, dense in zip(self.parameters, self.dense, strict=True):
            buffer = state[parameter].get(name)
            if buffer is None:
                state[parameter][name] = torch.zeros_like(dense)
            elif buffer.stride() != dense.stride():
                state[parameter][name] = torch.empty_like(dense).copy_(buffer)
        return [state[parameter][name] for parameter in self.parameters]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters]

    def make_dense(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients in the memory layout of `dense`, for the fused kernels. Also copies
        parameters in `views` into `dense`."""
        gradients = list(gradients)
        for index in self.views:
            self.dense[index].copy_(self.parameters[index])
            gradients[index] = gradients[index].contiguous()
        return gradients

    def write_views(self) -> None:
        """Copies what the kernel has made of `dense` into the parameters in `views`."""
        for index in self.views:
            self.parameters[index].copy_(self.dense[index])


def is_dense(parameter: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps, in any order of the axes."""
    return torch.ops.aten.is_non_overlapping_and_dense(parameter)


def is_expanded(parameter: Tensor) -> bool:
    """Whether several elements share memory, by the check that PyTorch makes before writing."""
    strides = zip(parameter.stride(), parameter.shape, strict=True)
    return parameter.numel() > 0 and any(s == 0 and length > 1 for s, length in strides)


class MultiTensor(torch.optim.Optimizer):
    """Honours `found_inf` by selection on the device, and can be captured in a CUDA graph.

    A subclass says in `prepare` which parameters are stepped together, and in DEFAULTS what its
    groups have besides `lr`.

    Args:
        params: parameters or groups.
        exchange: with the other ranks, where parameters are sharded. A copy by pickle or deepcopy
            is for a single process.
        settings: of DEFAULTS.

    Raises:
        TypeError: a setting is not in DEFAULTS.
    """

    DEFAULTS: ClassVar[dict]
    found_inf: Tensor | None = None
    exchange = Exchange()

    def __init__(self, params, lr: float, *, exchange: Exchange | None = None, **settings):
        for name in settings.keys() - self.DEFAULTS.keys():
            raise TypeError(f"{type(self).__name__} has no setting {name!r}")
        self._prepared: dict[int, tuple[dict, list[Tensor], list[Parameters]]] = {}
        if exchange is not None:
            self.exchange = exchange
        super().__init__(params, {"lr": lr} | self.DEFAULTS | settings)

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
        loss = loss_of(closure)
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


def loss_of(closure) -> Tensor | None:
    """What an optimizer's `step` returns: the loss of the closure that it was given, if any."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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
