"""Builds the `MixingControl` of a run."""

import math

from utils.plural import counted
from utils.runs.prepare import Ready
from utils.runs.run import Run
from utils.training.evaluation import evaluate
from utils.training.mixing_control import MixingControl


def build_mixing_control(
    run: Run, ready: Ready, total_steps: int, is_new: bool
) -> MixingControl | None:
    """With --mixup auto, builds what adjusts the strength of mixing, and says what is held out of a
    new run. The weights themselves are measured, not their moving average."""
    task = ready.task
    auto, loader = task.auto, task.train
    if auto is None:
        return None
    release_epoch = auto.strength.schedule_measurements(
        total_steps,
        loader.steps_per_epoch,
        loader.step_size,
        run.settings.mixup_off_epoch or None,
    )
    if is_new:
        run.console.say(_description(auto.strength, loader.samples, release_epoch))

    def loss(samples) -> float:
        return evaluate(ready.model, samples.epoch(), run.precision, exchange=run.exchange).loss

    def gap() -> float:
        ready.strategy.make_equal()
        trained, held_out = loss(task.trained), loss(task.held_out)
        if not math.isfinite(trained + held_out):
            return math.nan
        return 1 - trained / held_out if held_out else 0.0

    return MixingControl(auto.strength, auto.hold_out, gap, release_epoch, loader.steps_per_epoch)


def _description(strength, samples: int, release_epoch: int) -> str:
    if not strength.held_out:
        return (
            f"note: {samples:,} training samples are too few for --mixup auto to hold some of them "
            f"out: the strength is fixed at {strength.start:g}"
        )
    if not strength.measures:
        return (
            "note: the run is too short for --mixup auto to measure overfitting: nothing is mixed; "
            "--mixup 0.1 (say) mixes all the same"
        )
    first = "epoch" if release_epoch == 1 else counted(release_epoch, "epoch")
    return (
        f"--mixup auto: {strength.held_out:,} of the training samples are held out for the first "
        f"{first}, to measure overfitting; as many others are used twice, so that epochs keep "
        "their length"
    )
