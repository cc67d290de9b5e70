"""How long training takes, and in which phases."""

import time
from collections.abc import Callable

import torch

from .progress import Progress

# The phases of an epoch that are timed.
PHASES = ("data", "forward_backward", "optimizer", "checkpoint", "evaluation")


class Clock:
    """Measures the time spent training, without evaluations and checkpoints, but with the
    measurements of --mixup auto.

    Args:
        progress: its `seconds_training` is increased.
        device: where the model is.
        started: `time.monotonic()` when the process began; None: now.
        gpus: that the run now has.
    """

    def __init__(
        self,
        progress: Progress,
        device: torch.device,
        started: float | None = None,
        gpus: int = 0,
    ):
        self.progress, self.device, self.gpus = progress, device, gpus
        self.started = time.monotonic() if started is None else started
        self.started_step = 0  # the step at which this process began
        self.seconds_first_step = 0.0  # in this process, compilation included
        self._seconds_before = 0.0  # of earlier processes of the run, in all
        self._gpu_seconds_before = 0.0
        self._trained_before = 0.0  # `seconds_training` of earlier processes
        self.begin_epoch()

    def resumed(self) -> None:
        """To be called when `progress` has been restored from a checkpoint."""
        self._seconds_before = self.progress.seconds_total
        before = self.progress.gpu_seconds
        if before is None:  # an older version did not count: the run may have had as many GPUs
            before = self.gpus * self._seconds_before
        self._gpu_seconds_before = before

    def begin(self) -> None:
        """To be called when training begins in this process."""
        self.started_step = self.progress.step
        self._trained_before = self.progress.seconds_training

    def begin_epoch(self) -> None:
        self.samples, self._lap_seconds = 0, 0.0  # since the last lap
        self.resume()

    def resume(self) -> None:
        self._since = time.monotonic()

    def pause(self) -> None:
        """Stops the clock, after waiting for the device: its pending work counts as training."""
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

    def end_first_step(self) -> None:
        """Waits for the device, once in each process of a run."""
        wait_for(self.device)
        self.seconds_first_step = time.monotonic() - self._since

    @property
    def seconds_total(self) -> float:
        """Of the run, over all its processes so far."""
        return self._seconds_before + time.monotonic() - self.started

    @property
    def gpu_seconds(self) -> float:
        """The sum over the GPUs of the run, with as many as each of its processes had."""
        return self._gpu_seconds_before + self.gpus * (time.monotonic() - self.started)

    def speed(self, samples_until: Callable[[int], int]) -> float | None:
        """Samples per second in this process, without its first step, which sets up memory and
        compiles. None: not known.

        Args:
            samples_until: (step) -> samples in that many steps.
        """
        step, trained = self.progress.step, self.progress.seconds_training
        if step == self.started_step:  # no step was left: the average of the earlier processes
            return samples_until(step) / trained if trained else None
        samples = samples_until(step) - samples_until(self.started_step + 1)
        seconds = trained - self._trained_before - self.seconds_first_step
        return samples / seconds if samples and seconds > 0 else None


class PhaseTimes:
    """Seconds spent in each phase: `mark(phase)` at its end counts all time since the last mark.

    On a GPU the marks are events on its stream: they measure the device's time, including its waits
    for the host or the data, and are read when the host waits anyway.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys((*PHASES, "other"), 0.0)
        # (the phase that ended, when: an event or a time)
        self._marks: list[tuple] = []

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

    def fractions(self) -> dict[str, float]:
        """{phase: its fraction of the time since the last call}, to 3 digits. Waits for the
        device."""
        wait_for(self.device)
        self.read()
        total = sum(self.seconds.values())
        fractions = {phase: round(s / total, 3) for phase, s in self.seconds.items() if total}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return fractions


def wait_for(device: torch.device) -> None:
    """Returns when the device has finished its pending work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
