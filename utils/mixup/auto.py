"""`--mixup auto`: the strength of mixing follows how far the network overfits.

Mixing pays where a network overfits, and costs accuracy where it does not. So some training samples
are held out, and now and then their loss is compared with that of samples that are trained on:

    gap = 1 - loss on trained samples / loss on held-out samples
    strength <- strength + GAIN (gap - TARGET), between 0 and 1

Lambda is then drawn from Beta(strength alpha, strength alpha). Controlling a regularisation by the
overfitting that it prevents is from Karras et al., "Training generative adversarial networks with
limited data" (2020), arXiv:2006.06676; here it is applied to mixing. How the numbers were found:
benchmarks/results/mixup.md.
"""

import math
from typing import NamedTuple

TARGET, GAIN = 0.2, 0.5
# Strength at the start of a run of so many epochs, in between linear in their logarithm, outside
# constant: the more often a network sees the same samples, the further it overfits.
START = ((5.0, 0.1), (50.0, 1.0))
# A strength below it is 0. Strengths are rounded to hundredths, so that rounding errors of the
# losses, which depend on the number of ranks, hardly ever reach lambda.
LEAST = 0.05
# Fractions of the run: a measurement is due this often at most; after the last one all samples
# train, and the strength stays; in the end it fades out.
EVERY, LAST, FADE = 1 / 20, 0.8, 0.9
# Measuring may take this fraction of the time of the passes; evaluating a sample takes about a
# third of the time of training on it.
COST, FORWARD = 0.012, 1 / 3
# Samples to hold out: a fiftieth, at least HELD_OUT, but never more than a tenth.
HELD_OUT = 250
LEAST_HELD_OUT = 50  # with fewer the gap is noise


class Reading(NamedTuple):
    """A measurement, and the strength that follows from it; a list in a checkpoint."""

    step: int  # optimizer steps done
    gap: float
    strength: float


def held_out_samples(n: int) -> int:
    """How many of n training samples are held out; 0: they are too few to measure the gap."""
    count = min(max(HELD_OUT, n // 50), n // 10)
    return count if count >= LEAST_HELD_OUT else 0


def start_strength(epochs: float) -> float:
    """Strength at the start of a run of so many epochs, 0 to 1."""
    (few, low), (many, high) = START
    along = math.log(max(epochs, 1e-9) / few) / math.log(many / few)
    return round(low + (high - low) * min(max(along, 0.0), 1.0), 2)


def next_strength(strength: float, gap: float) -> float:
    """The strength after a measured gap; one that is not finite changes nothing."""
    if not math.isfinite(gap):
        return strength
    changed = round(min(max(strength + GAIN * (gap - TARGET), 0.0), 1.0), 2)
    return changed if changed >= LEAST else 0.0


class AutoStrength:
    """The strength of mixing at each step of a run, and when it is measured.

    Args:
        held_out: samples that are held out; 0: the strength stays as it starts.
        cost: fraction of the time of the passes that measuring may take.
    """

    def __init__(self, held_out: int, cost: float = COST):
        self.held_out, self.cost = held_out, cost
        self.start, self.total_steps = 1.0, 0  # until `plan`: as strong as it can become
        self.every = self.last_step = 0
        self.trace: list[Reading] = []

    def plan(self, total_steps: int, steps_per_epoch: int, step_size: int) -> int | None:
        """Plans the measurements of a run; returns the epoch from which all samples train, None if
        none does.

        Args:
            step_size: samples in an optimizer step.
        """
        self.total_steps = total_steps
        self.start = start_strength(total_steps / steps_per_epoch)
        steps = 2 * self.held_out * FORWARD / step_size  # that take as long as a measurement
        self.every = math.ceil(max(EVERY * total_steps, steps / self.cost))
        epochs = -(-total_steps // steps_per_epoch)
        joins = round(LAST * epochs)
        self.last_step = min(math.floor(LAST * total_steps), joins * steps_per_epoch)
        return joins if joins < epochs else None

    def stop_at(self, step: int) -> None:
        """No measurement after `step` steps."""
        self.last_step = min(self.last_step, step)

    def due(self, step: int) -> bool:
        """Whether the gap is to be measured after `step` steps."""
        if not self.held_out or not 0 < step <= self.last_step:
            return False
        return step % self.every == 0 and not (self.trace and self.trace[-1].step >= step)

    def observe(self, step: int, gap: float) -> Reading:
        """Takes in the gap measured after `step` steps."""
        reading = Reading(step, gap, next_strength(self.current, gap))
        self.trace.append(reading)
        return reading

    @property
    def current(self) -> float:
        """The strength after the last measurement."""
        return self.trace[-1].strength if self.trace else self.start

    def __call__(self, step: int) -> float:
        """The strength of step `step`, counted from 0.

        A measurement takes effect a step later than it could: on a GPU the next step's batch is
        made before the measurement, elsewhere after it, and both are to be mixed alike.
        """
        strength = self.start
        for reading in reversed(self.trace):
            if reading.step < step:
                strength = reading.strength
                break
        if not self.total_steps:
            return strength
        left = (self.total_steps - step) / ((1 - FADE) * self.total_steps)
        return strength * min(max(left, 0.0), 1.0)
