"""What is reported during training: lines on the console and records in metrics.jsonl."""

from collections.abc import Mapping

from utils.mixup.auto import Reading
from utils.plural import counted
from utils.reporting.console import Console, duration, epoch_text
from utils.reporting.metrics import MetricsLog, NoMetrics
from utils.training.evaluation import Evaluation
from utils.training.hardware import Hardware, hardware_text
from utils.training.progress import LeftOut

# A phase that takes at least this fraction of an epoch's time gets a line of advice.
NOTABLE = {
    "data": 0.2,
    "forward_backward": 0.7,
    "optimizer": 0.25,
    "checkpoint": 0.05,
    "evaluation": 0.35,
}


class TrainingLog:
    """Writes the lines and records of a run.

    Args:
        console, metrics: of the run.
        hardware: how well the GPUs are used.
        advice: {phase: which flag helps}, printed once if that phase takes a notable part of an
            epoch's time; "memory": which one helps when memory has run out, for the Trainer.

    Methods named write_ write to metrics.jsonl, the others print on the console (`unfrozen` does
    both). `at` is the position of a record: {"step": ..., "epoch": ...}.
    """

    def __init__(
        self,
        console: Console,
        metrics: MetricsLog | NoMetrics,
        advice: dict[str, str] | None = None,
        hardware: Hardware | None = None,
    ):
        self.console, self.metrics, self.advice = console, metrics, dict(advice or {})
        self.hardware = hardware or Hardware()
        self._of_hardware: dict[str, float] = {}  # as written last

    def write_steps(
        self,
        at: dict,
        sums: Mapping[str, float],
        *,
        lr: float,
        speed: float,
        left_out: LeftOut,
        further: dict,
    ) -> None:
        """Writes the record that goes with a log line: means since the last one. `further`: other
        figures."""
        self._of_hardware = self.hardware.figures(speed)
        self.metrics.write(
            **at, split="train", average_over="steps", **figures(sums), lr=lr,
            samples_per_second=round(speed, 1), skipped_steps=left_out.steps + left_out.by_scaler,
            **further, **self._of_hardware,
        )  # fmt: skip

    def show(
        self, sums: Mapping[str, float], epoch: float, samples_left: int, speed: float | None = None
    ) -> None:
        """Shows loss and accuracy beside the progress bar; without a terminal as a plain line, now
        and then."""
        live = self.console.live
        if live:
            self.console.progress(bar_text(sums))
            return
        text = log_text(sums, epoch, samples_left, speed)
        self.console.progress(text + (hardware_text(self._of_hardware) if speed else ""))

    def write_epoch(
        self,
        at: dict,
        train: dict,
        *,
        lr: float,
        speed: float | None,
        time_share: dict,
        memory: int,
    ) -> None:
        """Writes the record of a finished epoch.

        Args:
            train: the epoch's `figures`.
            time_share: {phase: fraction of the time}.
            memory: the peak, in bytes.
        """
        self.metrics.write(
            **at, split="train", average_over="epoch", **train, lr=lr, samples_per_second=speed,
            time_share=time_share, peak_memory_bytes=memory,
        )  # fmt: skip

    def say_start(self, split: str, evaluation: Evaluation) -> None:
        self.console.say(f"before the first step: {_in_words(split, evaluation)}")

    def say_epoch(
        self, epoch: float, train: dict, split: str, evaluation: Evaluation | None, note: str
    ) -> None:
        line = f"epoch {epoch_text(epoch)}: train loss {train['loss']:.4f}, {accuracy_text(train)}"
        if evaluation is not None:
            line += f"; {_in_words(split, evaluation)}"
        self.console.say(line + note)

    def write_mixing(self, at: dict, reading: Reading) -> None:
        """Writes what --mixup auto has measured, and the strength that follows."""
        self.metrics.write(**at, split="mixing", gap=reading.gap, strength=reading.strength)

    def advise(self, time_share: Mapping[str, float], is_last: bool = False) -> None:
        """Says which flag helps if a phase takes a notable part of an epoch's time.

        Args:
            is_last: no epoch follows, so that evaluating less often would be too late.
        """
        for phase, part in time_share.items():
            if is_last and phase == "evaluation":
                continue
            if phase in self.advice and part >= NOTABLE[phase]:
                took = f"{phase.replace('_', ' and ')} took {part:.0%} of the time"
                self.console.say(f"{took}: {self.advice.pop(phase)}")  # once

    def unfrozen(self, step: int, epoch: int) -> None:
        self.metrics.write(step=step, epoch=float(epoch), split="event", event="unfrozen")
        self.console.say(f"after {counted(epoch, 'epoch')}: from here on all layers train")


def _in_words(split: str, evaluation: Evaluation) -> str:
    return f"{split} loss {evaluation.loss:.4f}, accuracy {evaluation.accuracy:.2f} %"


def figures(sums: Mapping[str, float]) -> dict:
    """Means from an objective's sums by name (see objective.py); accuracies in per cent.

    With SUMS alone they are `loss` and `accuracy`. With MIXED_SUMS the accuracy is weighted by
    lambda and called `accuracy_weighted`. `lambda` is there where samples were mixed: the mean of
    the larger of lambda and 1 - lambda. `accuracy_clean` is there where unmixed samples were
    evaluated.
    """
    mixed = "mixed" in sums
    accuracy, samples = "accuracy_weighted" if mixed else "accuracy", sums["samples"]
    if not samples:
        return {"loss": float("nan"), accuracy: float("nan")}
    result = {"loss": sums["loss"] / samples, accuracy: 100 * sums["correct"] / samples}
    if mixed and sums["mixed"]:
        result["lambda"] = sums["larger_lambda"] / sums["mixed"]
    if mixed and sums["clean_samples"]:
        result["accuracy_clean"] = 100 * sums["clean_correct"] / sums["clean_samples"]
    return result


def accuracy_text(mean: dict) -> str:
    """The accuracy in `figures`, as text."""
    weighted = "accuracy_weighted" in mean
    value = mean["accuracy_weighted" if weighted else "accuracy"]
    text = f"accuracy {'weighted by lambda ' if weighted else ''}{value:.2f} %"
    if "accuracy_clean" in mean:
        text += f", unmixed {mean['accuracy_clean']:.2f} %"
    return text


def bar_text(sums: Mapping[str, float]) -> str:
    """Loss and accuracy beside the progress bar, in few words: the line has 80 characters."""
    mean = figures(sums)
    weighted = mean.get("accuracy_weighted")
    accuracy = f"{mean['accuracy']:.1f} %" if weighted is None else f"{weighted:.1f} % weighted"
    return f"loss {mean['loss']:.3f}, {accuracy}"


def log_text(
    sums: Mapping[str, float], epoch: float, samples_left: int, speed: float | None
) -> str:
    """Loss and accuracy, speed and the time left, as a line of its own.

    Args:
        epoch: epochs trained.
        samples_left: to the end of the run.
        speed: samples per second; None where it is not known yet.
    """
    mean = figures(sums)
    text = f"epoch {epoch:.2f}: train loss {mean['loss']:.4f}, {accuracy_text(mean)}"
    if speed:
        text += f", {speed:,.0f} samples/s, {duration(samples_left / speed)} left"
    return text
