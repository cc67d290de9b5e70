"""Measures the overfitting that `--mixup auto` follows, during training."""

from collections.abc import Callable

from utils.data.loader import HoldOut
from utils.mixup.auto import AutoStrength, Reading


class MixingControl:
    """Adjusts the strength of mixing in the course of a run.

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
