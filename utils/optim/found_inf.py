"""`found_inf` for optimizers that know nothing of it, and for what a host counts.

The trainer says with this flag, a float tensor () on the device, that a step must leave no trace.
PyTorch's fused optimizers read it on the device. Others are made to honour it here: tensors on the
device are put back there by selection, in the step itself; numbers that the host keeps (the steps
done, say) are put back at the next step, for until then the host need not know.
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
    """A flag of the device that the host learns one step later.

    By then the device has computed it long ago, unless the host is more than a whole step ahead:
    only then does the host wait, and the device never runs out of work by it.
    """

    def __init__(self):
        self._pending = self._pinned = None

    def expect(self, flag: Tensor, undo: Callable[[], None]) -> None:
        """`undo` is called by the next `settle` if `flag`, (), is not 0."""
        ready = None
        if flag.is_cuda:
            if self._pinned is None:  # kept: to make one can hold up the device
                self._pinned = torch.empty((), dtype=flag.dtype, pin_memory=True)
            on_host = self._pinned.copy_(flag, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        else:
            on_host = flag.to("cpu", copy=True)
        self._pending = on_host, ready, undo

    def settle(self) -> None:
        """Before anything that depends on what the host counts."""
        if self._pending is None:
            return
        (on_host, ready, undo), self._pending = self._pending, None
        if ready is not None:
            ready.synchronize()
        if on_host:
            undo()


class HonoursFoundInf:
    """Goes before an optimizer class among the bases of a class, and makes it honour `found_inf`.

    Nothing is left of a step at which it is 1: parameters, state and the numbers that the step
    changes in the parameter groups are those of before, to the bit. On the CPU the flag is read
    and the step not taken: it returns None, and the closure is not called. On a GPU the step is
    taken beside copies of parameters and state, which cost their memory meanwhile, and the host is
    at most one step ahead: it waits for the flag of the step before.
    """

    found_inf: Tensor | None = None

    def __getstate__(self) -> dict:
        self._late.settle()
        return super().__getstate__()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._late = LateFlag()  # what was expected concerns a state that is gone

    def __init__(self, *args, **kwargs):
        self._late = LateFlag()
        super().__init__(*args, **kwargs)

    def state_dict(self) -> dict:
        self._late.settle()
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure=None):
        self._late.settle()
        if self.found_inf is None:
            return super().step(closure)
        if is_on_host(self.found_inf):
            return None if self.found_inf else super().step(closure)
        return self._step_by_selection(closure)

    def _step_by_selection(self, closure=None):
        before = _Before(self, self.found_inf.device)
        loss = super().step(closure)
        before.select(self.found_inf)
        self._late.expect(self.found_inf, before.undo_on_host(self.param_groups))
        return loss


class _Before:
    """What an optimizer was before a step."""

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
        """Puts tensors on the device back where `flag`."""
        left_out = flag > 0
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            torch.where(left_out, copy, tensor, out=tensor)
        self.copies = []

    def undo_on_host(self, groups: list[dict]) -> Callable[[], None]:
        """A function that puts back what lies on the host, and drops state that is new."""
        # In the groups only what the step has changed: others change them too (the schedule).
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
