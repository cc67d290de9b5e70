"""How far a run has come, as a checkpoint stores it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..measures.table import MEASURES, Measure

# PyTorch is not imported here: the entry scripts import this module before they check the flags.


# The sums of older checkpoints, which have no names, in their order.
OLD_SUMS = (
    "loss",
    "correct",
    "samples",
    "larger_lambda",
    "mixed",
    "clean_correct",
    "clean_samples",
)


def named_sums(saved: Mapping[str, float] | Iterable[float]) -> dict[str, float]:
    """The sums that a checkpoint stores, by name."""
    return dict(saved if isinstance(saved, Mapping) else zip(OLD_SUMS, saved, strict=False))


class LeftOut(NamedTuple):
    """Steps that were not applied, because a loss or gradient was not finite (see guard.py)."""

    steps: int = 0
    first: int = -1  # number of the first one, from 0; -1: there is none
    by_scaler: int = 0  # while fp16's loss scaler searched for its scale; not counted in `steps`


@dataclass
class Progress:
    """Saved with every checkpoint. Epoch and position in it follow from the step."""

    step: int = 0  # optimizer steps finished
    ended_step: int = 0  # the last step after which the work at an epoch's end was done
    # Sums of the objective, by name, of this epoch up to its last log line, and from there to the
    # saved step; empty before a Trainer is made.
    epoch_sums: dict[str, float] = field(default_factory=dict)
    window_sums: dict[str, float] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)
    train: dict | None = None  # the last epoch's training figures
    evaluated: dict | None = None  # the last evaluation
    best_step: int | None = None
    best_epoch: float | None = None
    best_val_accuracy: float | None = None
    best_val_loss: float | None = None  # of the best step; None in older checkpoints
    best_val_value: float | None = None  # likewise, of a measure that --best_by names
    lowest_val_loss: float | None = None
    since_best: int = 0  # evaluations on the validation split since the best or the lowest loss
    stopped_early: bool = False
    mixing: dict | None = None  # with --mixup auto, see controls.py
    time_plan: list[list[int]] | None = None  # with --time_budget, see time_budget.py
    # Without evaluations and checkpoints, but with the measurements of --mixup auto.
    seconds_training: float = 0.0
    # Of the run and the runs that it resumed, to the last checkpoint.
    seconds_total: float = 0.0
    gpu_seconds: float | None = None  # likewise: the sum over all its GPUs; None: not counted then

    def __post_init__(self):
        self.left_out = LeftOut(*self.left_out)  # a checkpoint has a list
        self.epoch_sums = named_sums(self.epoch_sums)
        self.window_sums = named_sums(self.window_sums)

    def take_validation(
        self,
        accuracy: float,
        loss: float,
        by: Measure = MEASURES["accuracy"],
        value: float | None = None,
    ) -> tuple[bool, bool]:
        """Takes the figures of an evaluation on the validation split.

        Args:
            by: the measure that decides; equal values are judged by the loss.
            value: of that measure, not used for accuracy and loss; None: undefined.

        Returns:
            (whether they are the best so far, whether the loss is the lowest so far)
        """
        lowest = self.lowest_val_loss
        falls = self.best_val_accuracy is None if lowest is None else loss < lowest
        most, before = self.best_val_accuracy, self.best_val_loss  # None: not finite, or not known
        finite = loss if math.isfinite(loss) else None  # JSON has no infinity
        known = {"accuracy": (accuracy, most), "loss": (finite, before)}
        now, then = known.get(by.name, (value, self.best_val_value))
        tie = now == then and before is not None and loss < before
        best = most is None or by.score(now) > by.score(then) or tie
        if falls or lowest is None:
            self.lowest_val_loss = finite
        if best:
            self.best_val_accuracy, self.best_val_loss = accuracy, finite
            self.best_val_value = value
        return best, falls

    def load(self, saved: dict) -> None:
        """Goes on from what a checkpoint stores."""
        vars(self).update(vars(Progress(**saved)))
