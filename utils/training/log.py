"""What is reported during training: lines on the console and records in metrics.jsonl."""

from collections.abc import Mapping

from ..plural import counted
from ..reporting.console import Console, duration, epoch_text
from ..reporting.metrics import MetricsLog, NoMetrics
from .evaluation import Evaluation
from .hardware import Hardware, hardware_text
from .objective import figures
from .time_budget import TimePlan

# A phase that takes at least this fraction of an epoch's time gets a line of advice.
NOTABLE = {
    "data": 0.2,
    "forward_backward": 0.7,
    "optimizer": 0.25,
    "checkpoint": 0.05,
    "evaluation": 0.35,
}


class TrainingLog:
    """The lines of a run, and where its records go.

    Args:
        console, metrics: of the run.
        hardware: how well the GPUs are used.
        advice: {phase: which flag helps}, printed once if that phase takes a notable part of an
            epoch's time; "memory": which one helps when memory has run out, for the Trainer.
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

    def show(
        self,
        sums: Mapping[str, float],
        epoch: float,
        samples_left: int,
        speed: float | None = None,
        hardware: Mapping[str, float] | None = None,
    ) -> None:
        """Shows loss and accuracy beside the progress bar; without a terminal, now and then, as a
        line of its own with speed and the time left.

        Args:
            epoch: epochs trained.
            samples_left: to the end of the run.
            speed: samples per second; None where it is not known yet.
            hardware: figures of the GPUs.
        """
        mean = figures(sums)
        if self.console.live:  # in few words: the line has 80 characters
            weighted = "accuracy_weighted" in mean
            accuracy = mean["accuracy_weighted" if weighted else "accuracy"]
            note = " weighted" * weighted
            self.console.progress(f"loss {mean['loss']:.3f}, {accuracy:.1f} %{note}")
            return
        text = f"epoch {epoch:.2f}: {_train_text(mean)}"
        if speed:
            text += f", {speed:,.0f} samples/s, {duration(samples_left / speed)} left"
            text += hardware_text(hardware or {})
        self.console.progress(text)

    def say_epoch(
        self, epoch: float, train: dict, split: str, evaluation: Evaluation | None, note: str
    ) -> None:
        line = f"epoch {epoch_text(epoch)}: {_train_text(train)}"
        if evaluation is not None:
            line += f"; {split} loss {evaluation.loss:.4f}, {evaluation.in_words()}"
        self.console.say(line + note)

    def advise(self, time_share: Mapping[str, float], is_last: bool = False) -> None:
        """Says which flag helps if a phase takes a notable part of an epoch's time."""
        for phase, part in time_share.items():
            if is_last and phase == "evaluation":  # no epoch follows that could have fewer
                continue
            if phase in self.advice and part >= NOTABLE[phase]:
                took = f"{phase.replace('_', ' and ')} took {part:.0%} of the time"
                self.console.say(f"{took}: {self.advice.pop(phase)}")  # once

    def planned(self, at: dict, plan: TimePlan, samples: int, line: str) -> None:
        """Of --time_budget: `samples` are those of the whole run, `line` is said unless empty."""
        steps, every = plan.total_steps, plan.eval_every
        self.metrics.write(**at, split="plan", total_steps=steps, eval_every=every)
        self.console.resize_bar(samples)
        if line:
            self.console.say(line)

    def unfrozen(self, step: int, epoch: int) -> None:
        self.metrics.write(step=step, epoch=float(epoch), split="event", event="unfrozen")
        self.console.say(f"after {counted(epoch, 'epoch')}: from here on all layers train")


def _train_text(mean: dict) -> str:
    """Loss and accuracy in `figures`."""
    weighted = "accuracy_weighted" in mean
    value = mean["accuracy_weighted" if weighted else "accuracy"]
    accuracy = f"accuracy {'weighted by lambda ' if weighted else ''}{value:.2f} %"
    if "accuracy_clean" in mean:
        accuracy += f", unmixed {mean['accuracy_clean']:.2f} %"
    return f"train loss {mean['loss']:.4f}, {accuracy}"
