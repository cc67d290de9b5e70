"""The lines that a training prints as it goes on."""

from collections.abc import Callable, Mapping

from utils.reporting.console import duration
from utils.training.progress import NOTABLE, accuracy_text, figures


def bar_text(sums: Mapping[str, float]) -> str:
    """Loss and accuracy beside the progress bar, in few words: the line has 80 characters."""
    mean = figures(sums)
    weighted = mean.get("accuracy_weighted")
    accuracy = f"{mean['accuracy']:.1f} %" if weighted is None else f"{weighted:.1f} % weighted"
    return f"loss {mean['loss']:.3f}, {accuracy}"


def log_text(
    sums: Mapping[str, float], epoch: float, samples_left: int, speed: float | None
) -> str:
    """The same as a line of its own, where the output is no terminal.

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


def advise(advice: dict[str, str], time_share: Mapping[str, float], say: Callable) -> None:
    """Says which flag helps where a phase takes a notable part of an epoch's time; each once, as
    `advice`, by phase, loses what was said."""
    for phase, part in time_share.items():
        if part >= NOTABLE.get(phase, 2.0) and phase in advice:
            say(f"{phase.replace('_', ' and ')} took {part:.0%} of the time: {advice.pop(phase)}")
