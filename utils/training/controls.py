"""What the trainer changes in the course of a run: which layers train, and how strongly samples are
mixed."""

from collections.abc import Callable, Iterator

from torch import nn

from ..data.loader import HoldOut
from ..mixup.auto import AutoStrength, Reading


class Freeze:
    """Switches between training the heads alone and training the whole model.

    The parameters of a frozen backbone require no gradient, so autograd keeps nothing of its
    forward pass and computes nothing below the head; its BatchNorms use their running statistics
    and do not update them, and it drops nothing (dropout, stochastic depth).

    Args:
        model: parameters outside the heads that require no gradient now remain frozen for good.
        heads: names of the submodules that always train, with all their parameters.
        until: the first epoch (from 0) in which the whole model trains; None: never.
    """

    def __init__(self, model: nn.Module, heads: tuple[str, ...], until: int | None = None):
        self.model, self.until = model, until
        self.heads = [model.get_submodule(head) for head in heads]
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def head_parameters(self) -> Iterator[nn.Parameter]:
        for head in self.heads:
            yield from head.parameters()

    def frozen(self, epoch: int) -> bool:
        return self.until is None or epoch < self.until

    def apply(self, epoch: int) -> None:
        """Puts what trains in `epoch` into training mode, and the rest into evaluation mode."""
        frozen = self.frozen(epoch)
        self.model.train(not frozen)
        for parameter in self._trained:
            parameter.requires_grad_(not frozen)
        for head in self.heads:
            head.train()
            head.requires_grad_(True)


class MixingControl:
    """Adjusts the strength of mixing to the overfitting that `--mixup auto` measures.

    Args:
        strength: also used by the loader's Mixing, in each step.
        hold_out: also used by the loader.
        measure: () -> the gap, see utils/mixup/auto.py; collective, and equal on all ranks.
        release_epoch: the epoch from which the held-out samples are trained on as well.
        steps_per_epoch: optimizer steps.
    """

    def __init__(
        self,
        strength: AutoStrength,
        hold_out: HoldOut,
        measure: Callable[[], float],
        release_epoch: int,
        steps_per_epoch: int,
    ):
        self.strength, self.hold_out, self.measure = strength, hold_out, measure
        self.steps_per_epoch = steps_per_epoch
        self._release_from(release_epoch)

    def after_step(self, step: int) -> Reading | None:
        """To be called after each optimizer step, with the number of steps done. Returns the
        measurement if one was due; only then does the host wait for the device. Collective."""
        return self.strength.observe(step, self.measure()) if self.strength.is_due(step) else None

    def state_dict(self) -> dict:
        """For JSON; "joins" is `release_epoch`."""
        return {"trace": self.strength.saved_trace(), "joins": self.release_epoch}

    def load_state_dict(self, saved: dict, step: int) -> None:
        """Continues from the state in a checkpoint taken at `step`."""
        self.strength.load_trace(saved["trace"])
        epoch = saved["joins"]  # None in short runs of older versions
        if epoch is not None and step > epoch * self.steps_per_epoch:
            # The held-out samples have been trained on, so they no longer measure overfitting, even
            # if the run is longer now.
            self._release_from(epoch)

    def _release_from(self, epoch: int) -> None:
        self.release_epoch = epoch
        self.hold_out.release_from(epoch)
        self.strength.stop_at(epoch * self.steps_per_epoch)
