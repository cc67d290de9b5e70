"""`found_inf` for optimizers that do not know it, and for numbers that the host keeps.

If this flag, a float tensor () on the device, is not 0, a step must leave no trace. The optimizers
of the table see to that on the device. For any other class there is `HonoursFoundInf` (see
tests/worked_example/lion.py): it restores tensors on the device by selection, within the step, and
numbers on the host (a step count, say) at the next step, since the host does not need them earlier.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ABSENT = object()


def is_on_host(flag: Tensor) -> bool:
    """Whether the host can read the flag without waiting for a device."""
    return flag.device.type == "cpu"


class LateFlag:
    """A flag on the device that the host reads one step later.

    By then the device has usually computed it. The host waits only if it is more than a whole step
    ahead, so the device never runs out of work.
    """

    def __init__(self):
        self._pending = self._pinned = None

    def expect(self, flag: Tensor, undo: Callable[[], None]) -> None:
        """`undo` is called by the next `settle` if `flag`, (), is not 0."""
        ready = None
        if flag.is_cuda:
            if self._pinned is None:  # kept: allocating pinned memory can stall the device
                self._pinned = torch.empty((), dtype=flag.dtype, pin_memory=True)
            on_host = self._pinned.copy_(flag, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        else:
            on_host = flag.to("cpu", copy=True)
        self._pending = on_host, ready, undo

    def settle(self) -> None:
        """To be called before anything that uses the host's numbers."""
        if self._pending is None:
            return
        (on_host, ready, undo), self._pending = self._pending, None
        if ready is not None:
            ready.synchronize()
        if on_host:
            undo()


class HonoursFoundInf:
    """A mixin, to be listed before an optimizer class, that makes it honour `found_inf`.

    A step with `found_inf` 1 leaves no trace: parameters, state and what the step changed in the
    parameter groups are as before, to the bit. On the CPU the flag is read and the step is not
    taken: `step` returns None without calling the closure. On a GPU parameters and state are copied
    before the step, which takes memory while it runs, and the host is at most one step ahead: it
    waits for the previous step's flag.
    """

    found_inf: Tensor | None = None

    def __getstate__(self):
        self._late.settle()
        return super().__getstate__()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._late = LateFlag()  # a pending flag belongs to the state that was replaced

    def __init__(self, *args, **kwargs):
        self._late = LateFlag()
        super().__init__(*args, **kwargs)

    def state_dict(self) -> dict:
        self._late.settle()
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure=None):
        self._late.settle()
        found_inf, self.found_inf = self.found_inf, None  # PyTorch's classes would see it, too
        try:
            if found_inf is None or is_on_host(found_inf):
                return None if found_inf else super().step(closure)
            return self._step_by_selection(found_inf, closure)
        finally:
            self.found_inf = found_inf

    def _step_by_selection(self, found_inf: Tensor, closure):
        before = _Before(self, found_inf.device)
        loss = super().step(closure)
        before.select(found_inf)
        self._late.expect(found_inf, before.undo_on_host(self.param_groups))
        return loss


def honouring(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of any class, which honours `found_inf` from now on."""
    kind, fused = type(optimizer), getattr(optimizer, "_step_supports_amp_scaling", False)
    if fused and kind is not torch.optim.SGD:  # it does already; why not SGD's, see sgd.py
        return optimizer
    optimizer.__class__ = type(kind.__name__, (HonoursFoundInf, kind), {})
    optimizer._late = LateFlag()  # type: ignore[attr-defined]
    return optimizer


class _Before:
    """A copy of an optimizer's parameters, state and groups from before a step."""

    def __init__(self, optimizer, device: torch.device):
        self.optimizer = optimizer
        self.groups = [_copied(group) for group in optimizer.param_groups]
        self.state = {}
        self.tensors = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        for parameter, values in optimizer.state.items():
            on_device = {
                key: value
                for key, value in values.items()
                if isinstance(value, Tensor) and value.device == device
            }
            self.tensors += on_device.values()
            self.state[parameter] = _copied(values) | on_device
        self.copies = [tensor.clone() for tensor in self.tensors]

    def select(self, flag: Tensor) -> None:
        """Restores the tensors on the device if `flag` is not 0."""
        left_out = flag > 0
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            torch.where(left_out, copy, tensor, out=tensor)
        self.copies = []

    def undo_on_host(self, groups: list[dict]) -> Callable[[], None]:
        """A function that restores what is on the host, and drops new state."""
        # In the groups only what the step changed: the schedule changes them, too.
        changed = [
            (group, key, old.get(key, _ABSENT))
            for group, old in zip(groups, self.groups, strict=True)
            for key in group
            if key != "params" and not _equal(group[key], old.get(key, _ABSENT))
        ]

        def undo() -> None:
            for group, key, old in changed:
                if old is _ABSENT:
                    del group[key]
                else:
                    group[key] = old
            state = self.optimizer.state
            for parameter in list(state):
                if parameter in self.state:
                    state[parameter] = self.state[parameter]
                else:
                    del state[parameter]

        return undo


def _copied(values: dict) -> dict:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def _equal(one, other) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
