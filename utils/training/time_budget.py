"""Fits a run into a time (`--time_budget`): how many steps, and how many evaluations.

The number of steps is planned once the speed is known, and corrected at later steps where the speed
has changed by more than a tenth. A plan depends on clocks, but all that is computed depends on the
plans alone: they are in every checkpoint, and a resumed run goes on with them.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UserError
from ..optim.schedules import Schedule
from ..plural import counted
from ..reporting.console import duration

# The speed is known after a twentieth of the time, or after so many steps which have taken a
# hundredth of it or so many seconds.
KNOWN_FRACTION, KNOWN_STEPS, KNOWN_LEAST, KNOWN_SECONDS = 0.05, 20, 0.01, 10.0
LOOKS = 6  # a plan is looked at again after a sixth of the steps that are left
# A plan is corrected that misses its end by more than this fraction of the time left for steps and
# evaluations, and by more than the margin.
TOLERANCE = 0.1
TOLD = 0.1  # a correction gets a line where the steps differ by more from those last told
EVALUATIONS = 0.1  # the most of the time that evaluations take before the last step
REPORT_SECONDS = 4.0  # that the report is thought to take before it is rehearsed
SLOWER = 1.5  # what was measured is thought to take up to so many times as long on a slower machine
# An evaluation of more than a part of the time is estimated again after another part of it.
LONG_EVALUATION, STALE = 0.03, 0.25
# Kept free at the end: a fraction of the time, but no more than so many seconds.
MARGIN, MARGIN_SECONDS = 0.015, 20.0


class TooShort(UserError):
    """The time is not enough for one step and an evaluation."""


class TimePlan(NamedTuple):
    """A list in checkpoints."""

    step: int  # it holds from here on
    total_steps: int
    eval_every: int  # epochs between evaluations


class Look(NamedTuple):
    """What rank 0 has found, for all ranks."""

    next_step: int  # the step of the next look
    plan: TimePlan | None = None  # a new one
    line: str = ""  # about it, if it changes much
    refusal: str = ""  # why the run cannot go on
    estimates: bool = False  # whether an evaluation is to be estimated before another look
    rehearses: bool = False  # whether a checkpoint and the report are to be written, and timed


@dataclass
class Cost:
    """Seconds that something took, when a step took `per_step`; None: that was not known yet."""

    seconds: float
    per_step: float | None = None

    def when(self, per_step: float) -> float:
        """What it takes when a step takes `per_step`: a slower machine slows down all."""
        self.per_step = self.per_step or per_step
        return self.seconds * min(SLOWER, max(1.0, per_step / (self.per_step or 1.0)))


class TimeBudget:
    """Plans a run.

    Args:
        seconds: of the run, with those before it was resumed.
        elapsed: () -> seconds of the run so far.
        most_steps: steps after which more time does not help.
        most_text: what says so.
        steps_per_epoch: optimizer steps.
        eval_every: epochs between evaluations, unless they would take too long.
        end_evaluations: evaluations after the last step, in evaluations of the usual split.
        end_seconds: of what else is done then, but for the last checkpoint and the report.
        plans: of the run that is resumed.

    Attributes:
        next_step: of the next look.
        evaluation, save: as last measured; None: not yet.
        report: curves and page.
    """

    def __init__(
        self,
        seconds: float,
        elapsed: Callable[[], float],
        *,
        most_steps: int,
        most_text: str,
        steps_per_epoch: int,
        eval_every: int = 1,
        end_evaluations: float = 1.0,
        end_seconds: float = 0.0,
        plans: list | None = None,
    ):
        self.seconds, self.elapsed = seconds, elapsed
        self.most_steps, self.most_text = most_steps, most_text
        self.steps_per_epoch, self.eval_every = steps_per_epoch, eval_every
        self.end_evaluations, self.end_seconds = end_evaluations, end_seconds
        self.plans = [TimePlan(*plan) for plan in plans or ()]
        self.next_step, self._evaluated_at = 0, 0.0
        self.evaluation: Cost | None = None
        self.save: Cost | None = None
        self.report = Cost(REPORT_SECONDS)
        self._per_step: float | None = None
        self._told = 0  # total steps of the last line about a plan
        self._others = 0.0  # seconds of this process that were not spent on steps
        # (step, seconds spent on steps) at each look, after the first step, which compiles.
        self._marks: list[tuple[int, float]] = []
        self._known_after = math.inf  # seconds spent on steps

    def is_due(self, step: int) -> bool:
        """Whether to `look` after that step."""
        last = self.plans[-1].total_steps if self.plans else self.most_steps
        return self.next_step <= step < last

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - self.elapsed()

    @property
    def end(self) -> float:
        """Seconds from the last step to the end of the run."""
        save, evaluations = self._now(self.save), self.end_evaluations * self._now(self.evaluation)
        return evaluations + save + self._now(self.report) + self.end_seconds

    def _now(self, cost: Cost | None) -> float:
        return 0.0 if cost is None else cost.when(self._per_step or 0.0)

    def evaluated(self, seconds: float, spent: float | None = None) -> None:
        """To be called after an evaluation, or after an estimate that took `spent` seconds."""
        self.evaluation, self._evaluated_at = Cost(seconds, self._per_step), self.elapsed()
        self._others += seconds if spent is None else spent

    def rehearsed(self, save: float, report: float) -> None:
        """To be called with the seconds that a checkpoint and the report have taken."""
        self.save, self.report = Cost(save, self._per_step), Cost(report, self._per_step)
        self._others += save + report

    def look(self, step: int, settling: bool = False) -> Look:
        """To be called after step `next_step`, before an evaluation, when the device has finished.

        Args:
            settling: the steps so far are slower than those to come.
        """
        if settling or not self._marks:
            self._marks = [(step, self.elapsed() - self._others)]
            self._known_after = KNOWN_FRACTION * max(self.left, 0.0)
            return Look(step + 1)
        if self._marks[-1][0] < step:
            self._marks.append((step, self.elapsed() - self._others))
        plan = self.plans[-1] if self.plans else None
        ahead = plan.total_steps - step if plan else self.most_steps
        if not self._is_known():
            return Look(step + max(1, min(step - self._marks[0][0], ahead // LOOKS)))
        per_step, rehearses = self._step_seconds(ahead), self.save is None
        self._per_step, evaluation = per_step, self._now(self.evaluation)
        is_long = self.end_evaluations * evaluation > LONG_EVALUATION * self.seconds
        is_stale = is_long and self.elapsed() - self._evaluated_at > STALE * self.seconds
        if self.evaluation is None or is_stale:
            return Look(step, estimates=True)

        def needed(total: int, every: int) -> float:
            evaluations = self._evaluations(step, total, every)
            return (total - step) * per_step + evaluations * evaluation

        margin = min(MARGIN * self.seconds, MARGIN_SECONDS)
        left = self.left - margin - self.end
        every = self._thinned(per_step)
        if plan is not None:
            missed = needed(plan.total_steps, plan.eval_every) - left
            no_more = plan.total_steps == self.most_steps and missed < 0
            if no_more or abs(missed) <= max(TOLERANCE * left, margin):
                return Look(step + max(1, ahead // LOOKS), rehearses=rehearses)
            if every / 2 <= plan.eval_every <= 2 * every:
                every = plan.eval_every
        elif self.left < self.end:
            return Look(step, refusal=self._refusal(per_step))
        totals = range(step, self.most_steps + 1)
        while True:
            fitting = bisect.bisect(totals, left, key=lambda total: needed(total, every))
            total = totals[max(0, fitting - 1)]
            is_full = left - needed(total, every) <= margin + per_step
            if is_full or total == self.most_steps or not self._evaluations(step, total + 1, every):
                break
            every *= 2  # there is no time for the next evaluation, but for more steps
        new, after = TimePlan(step, total, every), step + max(1, (total - step) // LOOKS)
        if plan is not None and new[1:] == plan[1:]:
            return Look(after, rehearses=rehearses)
        line = ""
        if abs(total - self._told) > TOLD * self._told:
            line, self._told = self._line(new, self.elapsed() + needed(total, every)), total
        return Look(after, new, line, rehearses=rehearses)

    def take(self, look: Look) -> None:
        """To be called on all ranks with what rank 0 has found."""
        self.next_step = look.next_step
        if look.plan is not None:
            self.plans.append(TimePlan(*look.plan))  # a list, as it comes from rank 0

    def _is_known(self) -> bool:
        """Whether enough steps have been timed."""
        (first, start), (step, now) = self._marks[0], self._marks[-1]
        least = min(KNOWN_LEAST * self.seconds, KNOWN_SECONDS)
        return now - start >= (least if step - first >= KNOWN_STEPS else self._known_after)

    def _step_seconds(self, ahead: int) -> float:
        """Of the last steps, up to twice as many as are `ahead`, or of a twentieth of the time, and
        up to half of those timed."""
        (first, start), (step, now) = self._marks[0], self._marks[-1]
        since, time = step - 2 * ahead, now - KNOWN_FRACTION * self.seconds
        recent = [m for m in self._marks[:-1] if m[0] >= since or m[1] >= time]
        recent = [m for m in recent if m[0] >= (first + step) / 2 or m[1] >= (start + now) / 2]
        before = recent[0] if recent else self._marks[-2]
        return (now - before[1]) / (step - before[0])

    def _evaluations(self, step: int, total: int, every: int) -> int:
        """How many follow step `step` and those after it, but for the last one, `total`."""
        interval = every * self.steps_per_epoch
        return (total - 1) // interval - (step - 1) // interval if interval else 0

    def _thinned(self, per_step: float) -> int:
        """Epochs between evaluations, a multiple of the usual number."""
        if not self.eval_every:
            return 0
        usual = per_step * self.steps_per_epoch * self.eval_every
        fewest = self._now(self.evaluation) * (1 / EVALUATIONS - 1)
        return self.eval_every * max(1, math.ceil(fewest / usual))

    def _line(self, plan: TimePlan, until: float) -> str:
        epochs = plan.total_steps / self.steps_per_epoch
        interval = plan.eval_every * self.steps_per_epoch
        evaluated = f"evaluated every {plan.eval_every} epochs"
        if plan.eval_every == 1:
            evaluated = "evaluated after every epoch"
        if not interval or interval >= plan.total_steps:
            evaluated = "evaluated at the end"
        corrected = ", corrected" if self.plans else ""
        most = f"; {self.most_text}" if plan.total_steps == self.most_steps else ""
        return (
            f"time budget {duration(self.seconds)}{corrected}: {counted(plan.total_steps, 'step')} "
            f"({epochs:.1f} epochs) until {duration(until)}, {evaluated}, {self.end:.0f} s for the "
            f"end{most}"
        )

    def _refusal(self, per_step: float) -> str:
        least = (self.elapsed() + per_step + self.end) / (1 - MARGIN)
        return (
            f"--time_budget {self.seconds:.0f}s is too short: the start of the run, a step and an "
            f"evaluation take about {math.ceil(least / 5) * 5}s here"
        )


@dataclass
class Timing:
    """What a Trainer needs to keep to a time.

    Args:
        budget: plans.
        schedule: (total steps) -> the schedule of the learning rate.
        evaluation_seconds: () -> an estimate of what an evaluation takes. Collective.
        rehearse_report: writes the report of the run so far.
    """

    budget: TimeBudget
    schedule: Callable[[int], Schedule]
    evaluation_seconds: Callable[[], float]
    rehearse_report: Callable[[], None]

    def changed(self, schedule: Schedule) -> Schedule:
        """The schedule by the newest plan; `schedule`: by those before."""
        plans = self.budget.plans
        if len(plans) == 1:
            before, schedule = schedule, self.schedule(plans[0].total_steps)
            schedule.load_state_dict(before.state_dict())
        else:
            schedule.corrections.append((plans[-1].step, plans[-1].total_steps))
        return schedule
