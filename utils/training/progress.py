"""How far a run has come: what a checkpoint stores of it, and the time that it took."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# The phases of an epoch that are timed.
PHASES = ("data", "forward_backward", "optimizer", "checkpoint", "evaluation")
# Fractions of an epoch's time from which on a phase is worth a line of advice.
NOTABLE = {
    "data": 0.2,
    "forward_backward": 0.7,
    "optimizer": 0.25,
    "checkpoint": 0.05,
    "evaluation": 0.35,
}


class LeftOut(NamedTuple):
    """Steps that were not applied, because a loss or gradient was not finite (see guard.py)."""

    steps: int = 0
    first: int = -1  # of `steps`, counted from 0; -1: there is none
    by_scaler: int = 0  # besides `steps`: in the search of fp16's loss scaler for its scale


@dataclass
class Progress:
    """Saved with every checkpoint. Epoch and position in it follow from the step."""

    step: int = 0  # optimizer steps finished
    ended_step: int = 0  # at which the end of an epoch was last carried out
    # The objective's sums of this epoch, and since the last log line; empty: nothing yet.
    epoch_sums: list[float] = field(default_factory=list)
    window_sums: list[float] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    train: dict | None = None  # the last epoch's training figures
    evaluated: dict | None = None  # the last evaluation
    best_step: int | None = None
    best_epoch: float | None = None
    best_val_accuracy: float | None = None
    since_best: int = 0  # evaluations on the validation split since the best one
    stopped_early: bool = False
    seconds_training: float = 0.0  # without evaluations and checkpoints
    seconds_total: float = 0.0  # of all processes of the run, to the last checkpoint

    def __post_init__(self):
        self.left_out = LeftOut(*self.left_out)  # a checkpoint has a list


class Clock:
    """Measures the time spent training, without evaluations and checkpoints."""

    def __init__(self, progress: Progress, device: torch.device):
        self.progress, self.device = progress, device
        self.samples = 0  # since the last lap
        self._lap_seconds = 0.0
        self.resume()

    def resume(self) -> None:
        self._since = time.monotonic()

    def pause(self) -> None:
        """Waits for the device first: its pending work is training."""
        wait_for(self.device)
        now = time.monotonic()
        self.progress.seconds_training += now - self._since
        self._lap_seconds += now - self._since
        self._since = now

    def lap(self) -> float:
        """Samples per second since the last lap."""
        self.pause()
        speed = self.samples / max(self._lap_seconds, 1e-9)
        self.samples, self._lap_seconds = 0, 0.0
        return speed

    def first_step(self) -> float:
        """Seconds since the start. Waits for the device, once in a run."""
        wait_for(self.device)
        return time.monotonic() - self._since


class PhaseTimes:
    """Seconds spent in each phase: `mark(phase)` at its end counts all time since the last mark.

    On a GPU the marks are events on its stream: they measure the device's time, including its waits
    for the host or the data, and are read when the host waits anyway.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys((*PHASES, "other"), 0.0)
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []

    def mark(self, phase: str) -> None:
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((phase, now))

    def read(self) -> None:
        """Adds up the marks so far. On a GPU call it after a synchronisation."""
        for (_, before), (phase, now) in zip(self._marks, self._marks[1:], strict=False):
            cuda = self.device.type == "cuda"
            self.seconds[phase] += before.elapsed_time(now) / 1000 if cuda else now - before
        del self._marks[:-1]

    def shares(self) -> dict[str, float]:
        """{phase: its fraction of the time since the last call}, to 3 digits. Waits for the
        device."""
        wait_for(self.device)
        self.read()
        total = sum(self.seconds.values())
        shares = {phase: round(s / total, 3) for phase, s in self.seconds.items() if total}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return shares


def wait_for(device: torch.device) -> None:
    """Returns when the device has finished its pending work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def figures(sums: Mapping[str, float]) -> dict:
    """Means from an objective's sums by name; accuracies in per cent. With SUMS alone they are
    `loss` and `accuracy`. With MIXED_SUMS too the accuracy is `accuracy_weighted`, by lambda; where
    samples were mixed there is `lambda`, the mean of the larger of lambda and 1 - lambda, and where
    unmixed samples were evaluated `accuracy_clean`."""
    mixed = "mixed" in sums
    name, none, samples = (
        "accuracy_weighted" if mixed else "accuracy",
        float("nan"),
        sums["samples"],
    )
    if not samples:
        return {"loss": none, name: none}
    result = {"loss": sums["loss"] / samples, name: 100 * sums["correct"] / samples}
    if mixed and sums["mixed"]:
        result["lambda"] = sums["larger_lambda"] / sums["mixed"]
    if mixed and sums["clean_samples"]:
        result["accuracy_clean"] = 100 * sums["clean_correct"] / sums["clean_samples"]
    return result


def accuracy_text(mean: dict, digits: int = 2) -> str:
    """The accuracy in `figures`, as text."""
    weighted = "accuracy_weighted" in mean
    value = mean["accuracy_weighted" if weighted else "accuracy"]
    text = f"accuracy {'weighted by lambda ' if weighted else ''}{value:.{digits}f} %"
    if "accuracy_clean" in mean:
        text += f", unmixed {mean['accuracy_clean']:.{digits}f} %"
    return text
