"""What a training says while it goes on."""

from utils.reporting.console import duration
from utils.training.progress import NOTABLE, accuracy_text, figures


def show(trainer, sums: list[float], speed: float | None = None) -> None:
    """Loss and accuracy beside the bar, or as a plain line now and then."""
    progress, mean = trainer.progress, figures(sums)
    weighted = mean.get("accuracy_weighted")  # as short as it can be said: a line of 80
    text = f"loss {mean['loss']:.3f}, "
    text += f"{mean['accuracy']:.1f} %" if weighted is None else f"{weighted:.1f} % weighted"
    if not trainer.console.live:
        epoch = progress.step / trainer.loader.steps_per_epoch
        text = f"epoch {epoch:.2f}: train loss {mean['loss']:.4f}, {accuracy_text(mean)}"
    if speed and not trainer.console.live:
        left = trainer.samples_until(trainer.total_steps) - trainer.samples_until(progress.step)
        text += f", {speed:,.0f} samples/s, {duration(left / speed)} left"
    trainer.console.progress(text)


def say_unfrozen(trainer, epoch: int) -> None:
    trainer.metrics.write(
        step=trainer.progress.step, epoch=float(epoch), split="event", event="unfrozen"
    )
    trainer.console.say(f"after {epoch} epochs: from here on all layers train")


def advise(trainer, shares: dict[str, float]) -> None:
    """The flag that helps where a phase takes a notable part of an epoch; each once."""
    for phase, share in shares.items():
        if share >= NOTABLE.get(phase, 2.0) and phase in trainer.advice:
            name = phase.replace("_", " and ")
            trainer.console.say(f"{name} took {share:.0%} of the time: {trainer.advice.pop(phase)}")
