"""Where a run is: what a checkpoint remembers of it, and the time it took."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Progress:
    """Where a run is; saved with every checkpoint. Epoch and position follow from the step."""

    step: int = 0  # optimizer steps done
    ended_step: int = 0  # the last step at which an epoch's end was carried out
    epoch_sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of objective.SUMS
    window_sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    left_out: list[int] = field(default_factory=lambda: [0, -1, 0])  # see Guard
    train: dict | None = None  # the last epoch's training figures
    evaluated: dict | None = None  # the last evaluation
    best_step: int | None = None
    best_epoch: float | None = None
    best_val_accuracy: float | None = None
    seconds_training: float = 0.0  # without evaluations and checkpoints
    seconds_total: float = 0.0  # of all processes of the run, to the last checkpoint


class Clock:
    """Time spent training, told apart from evaluations and checkpoints."""

    def __init__(self, progress: Progress, device: torch.device):
        self.progress, self.device = progress, device
        self.samples = 0  # since the last lap
        self._lap_seconds = 0.0
        self.resume()

    def resume(self) -> None:
        self._since = time.monotonic()

    def pause(self) -> None:
        """Waits for the device first: what it still has to do is training, not what comes next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
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
        """Seconds since the start; waits for the device, once in a run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - self._since


def figures(sums: list[float]) -> dict:
    """Mean loss and accuracy in per cent from objective.SUMS."""
    loss, correct, samples = sums
    if not samples:
        return {"loss": float("nan"), "accuracy": float("nan")}
    return {"loss": loss / samples, "accuracy": 100 * correct / samples}
