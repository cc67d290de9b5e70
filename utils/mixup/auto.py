"""`--mixup auto`: the strength of mixing follows how far the network is going to overfit.

Mixing helps a network that overfits, and costs accuracy otherwise. It acts early and pays late, so
its strength cannot wait for the overfitting. Therefore some training samples are held out at first,
and now and then their loss is compared with that of samples that are trained on:

    gap = 1 - loss on trained samples / loss on held-out samples

The gap grows about linearly in the steps, so a line through the origin says what it will be at the
end of the run:

    final gap = total steps * sum(step * gap) / sum(step^2), over all measurements, clipped to 0..1
    strength = (final gap)^2

Lambda is then drawn from Beta(strength, strength) until the next measurement. After the last one
the strength stays, and the held-out samples train, too. Controlling a regularisation by the
overfitting that it prevents is from Karras et al., "Training generative adversarial networks with
limited data" (2020), arXiv:2006.06676; here it is applied to mixing. How the rule was found, and
how it compares with fixed strengths: benchmarks/results/mixup.md.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

MIN_STRENGTH = 0.05  # smaller strengths count as 0
FALLBACK_STRENGTH = 0.2  # where there are too few samples to measure anything
# As fractions of the run: the shortest interval between two measurements, and when the last one may
# happen.
INTERVAL, MEASURE_UNTIL = 1 / 20, 0.4
# Until then measuring may take this fraction of the training time, so about 1 % of the whole run;
# evaluating a sample takes about a third as long as training on it.
COST, FORWARD = 0.024, 1 / 3
# Samples that are held out: HELD_OUT_FRACTION of all, but at least TARGET_HELD_OUT, unless that is
# more than MAX_HELD_OUT_FRACTION of all.
HELD_OUT_FRACTION, MAX_HELD_OUT_FRACTION = 1 / 50, 1 / 10
TARGET_HELD_OUT = 250
MIN_HELD_OUT = 50  # with fewer the gap is noise


class Reading(NamedTuple):
    """A measurement, and the strength that follows from it; stored as a list in checkpoints."""

    step: int  # optimizer steps done
    gap: float
    strength: float


def held_out_samples(n: int) -> int:
    """How many of n training samples are held out; 0: they are too few to measure the gap."""
    wanted = max(TARGET_HELD_OUT, math.floor(n * HELD_OUT_FRACTION))
    count = min(wanted, math.floor(n * MAX_HELD_OUT_FRACTION))
    return count if count >= MIN_HELD_OUT else 0


def final_gap(measured: Iterable[tuple[int, float]], total_steps: int) -> float:
    """The gap at the end of a run, by the line through the origin that is nearest to the gaps
    measured so far (least squares).

    Args:
        measured: (optimizer steps done, gap) each; those that are not finite do not count.

    Returns:
        not limited; 0.0 if nothing counts.
    """
    points = [(step, gap) for step, gap in measured if math.isfinite(gap)]
    squares = sum(step * step for step, _ in points)
    return total_steps * sum(step * gap for step, gap in points) / squares if points else 0.0


def strength_at(gap: float) -> float:
    """The strength for a final gap, 0 to 1. In hundredths, so that rounding errors of the losses,
    which depend on the number of ranks, hardly ever reach lambda."""
    strength = round(min(max(gap, 0.0), 1.0) ** 2, 2)
    return strength if strength >= MIN_STRENGTH else 0.0


class AutoStrength:
    """The strength of mixing at each step of a run, and when it is measured.

    Args:
        held_out: samples that are held out; 0: the strength is FALLBACK_STRENGTH.
        cost: fraction of the training time that measuring may take, until the last measurement.
    """

    def __init__(self, held_out: int, cost: float = COST):
        self.held_out, self.cost = held_out, cost
        # Until `schedule_measurements` as strong as it can become: --auto_batch tries how much
        # memory mixing takes.
        self.start = 1.0
        self.total_steps = self.interval = self.last_step = 0
        self.trace: list[Reading] = []

    def schedule_measurements(
        self, total_steps: int, steps_per_epoch: int, step_size: int, off_epoch: int | None = None
    ) -> int:
        """Schedules the measurements of a run; returns the epoch from which the held-out samples
        train, too: 0 if nothing can be measured.

        Args:
            step_size: samples in an optimizer step.
            off_epoch: the epoch from which nothing is mixed; None: there is none.
        """
        self.start = 0.0 if self.held_out else FALLBACK_STRENGTH
        self.total_steps = total_steps
        steps = 2 * self.held_out * FORWARD / step_size  # of training, as long as a measurement
        self.interval = math.ceil(max(INTERVAL * total_steps, steps / self.cost))
        epochs = -(-total_steps // steps_per_epoch)
        release_epoch = round(MEASURE_UNTIL * epochs)
        if off_epoch is not None:
            release_epoch = min(release_epoch, off_epoch)
        last_step = math.floor(MEASURE_UNTIL * total_steps)
        self.last_step = min(last_step, release_epoch * steps_per_epoch)
        return release_epoch if self.measures else 0

    @property
    def measures(self) -> bool:
        """Whether the run has enough samples and steps for a measurement."""
        return self.held_out > 0 and self.interval <= self.last_step

    def stop_at(self, step: int) -> None:
        """Measures no more after step `step`."""
        self.last_step = min(self.last_step, step)

    def is_due(self, step: int) -> bool:
        """Whether the gap is to be measured after `step` steps."""
        if not self.held_out or not 0 < step <= self.last_step:
            return False
        return step % self.interval == 0 and not (self.trace and self.trace[-1].step >= step)

    def observe(self, step: int, gap: float) -> Reading:
        """Records the gap measured after `step` steps, and sets the strength; a gap that is not
        finite leaves it as it is."""
        strength = self.current
        if math.isfinite(gap):
            measured = [(reading.step, reading.gap) for reading in self.trace]
            strength = strength_at(final_gap([*measured, (step, gap)], self.total_steps))
        reading = Reading(step, gap, strength)
        self.trace.append(reading)
        return reading

    def saved_trace(self) -> list[list]:
        """The measurements so far, for JSON."""
        return [list(reading) for reading in self.trace]

    def load_trace(self, saved: list[list]) -> None:
        """The inverse of `saved_trace`."""
        # JSON has no NaN: a gap that is not finite is null there.
        self.trace = [
            Reading(step, math.nan if gap is None else gap, strength)
            for step, gap, strength in saved
        ]

    @property
    def current(self) -> float:
        """The strength after the last measurement."""
        return self.trace[-1].strength if self.trace else self.start

    def __call__(self, step: int) -> float:
        """The strength of step `step`, counted from 0.

        A measurement after s steps holds for the steps s + 1, s + 2, ..., not for step s: on a GPU
        its batch is made before the measurement, elsewhere after it, and both are mixed alike.
        """
        known = (reading.strength for reading in reversed(self.trace) if reading.step < step)
        return next(known, self.start)
