"""Measures the overfitting that `--mixup auto` follows, during training."""

from collections.abc import Callable

from utils.data.hold_out import HoldOut
from utils.mixup.auto import AutoStrength, Reading


class MixingControl:
    """Adjusts the strength of mixing in the course of a run.

    Args:
        strength: also used by the loader's Mixing, in each step.
        hold_out: also used by the loader.
        measure: () -> the gap, see utils/mixup/auto.py; collective, and equal on all ranks.
        joins: epoch from which the held-out samples are trained on as well; None: never.
        steps_per_epoch: optimizer steps.
    """

    def __init__(
        self,
        strength: AutoStrength,
        hold_out: HoldOut,
        measure: Callable[[], float],
        joins: int | None,
        steps_per_epoch: int,
    ):
        self.strength, self.hold_out, self.measure = strength, hold_out, measure
        self.steps_per_epoch = steps_per_epoch
        self._join_from(joins)

    def after_step(self, step: int) -> Reading | None:
        """To be called after each optimizer step, with the number of steps done. Returns the
        measurement if one was due; only then does the host wait for the device. Collective."""
        return self.strength.observe(step, self.measure()) if self.strength.due(step) else None

    def state_dict(self) -> dict:
        """For JSON."""
        return {"trace": self.strength.saved_trace(), "joins": self.joins}

    def load_state_dict(self, saved: dict, step: int) -> None:
        """Continues from the state in a checkpoint taken at `step`."""
        self.strength.load_trace(saved["trace"])
        joins = saved["joins"]
        if joins is not None and step > joins * self.steps_per_epoch:
            # The held-out samples have been trained on, so they no longer measure overfitting, even
            # if the run is longer now.
            self._join_from(joins)

    def _join_from(self, epoch: int | None) -> None:
        self.joins = epoch
        self.hold_out.join_from(epoch)
        if epoch is not None:
            self.strength.stop_at(epoch * self.steps_per_epoch)
