"""Measures the overfitting that `--mixup auto` follows, as a training goes on."""

from collections.abc import Callable

from utils.data.hold_out import HoldOut
from utils.mixup.auto import AutoStrength, Reading


class MixingControl:
    """Adjusts the strength of mixing during a training.

    Args:
        strength: what the loader's mixing reads.
        hold_out: the samples that the loader holds out.
        measure: () -> the gap, see utils/mixup/auto.py; collective.
        joins: epoch from which the held-out samples are trained on, too; None: never.
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
        """To be called after each optimizer step; `step` of them are done. The host waits for the
        device where a measurement is due. Collective."""
        return self.strength.observe(step, self.measure()) if self.strength.due(step) else None

    def state_dict(self) -> dict:
        """For JSON."""
        return {"trace": [list(reading) for reading in self.strength.trace], "joins": self.joins}

    def load_state_dict(self, saved: dict, step: int) -> None:
        """Goes on from what a checkpoint of this step holds."""
        self.strength.trace = [Reading(*reading) for reading in saved["trace"]]
        joins = saved["joins"]
        if joins is not None and step > joins * self.steps_per_epoch:
            # They have been trained on: even if the run is longer now, they measure nothing more.
            self._join_from(joins)

    def _join_from(self, epoch: int | None) -> None:
        self.joins = epoch
        self.hold_out.join_from(epoch)
        if epoch is not None:
            self.strength.stop_at(epoch * self.steps_per_epoch)
