"""Trains a model to the end, measures it on the test set, and writes the report."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from utils.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint, read_checkpoint
from utils.errors import UserError
from utils.launch.signals import StoppedBySignal
from utils.plural import counted
from utils.reporting.console import duration, epoch_text
from utils.runs.dry_run import rehearse
from utils.runs.make_trainer import build_trainer
from utils.runs.prepare import ReadyModel
from utils.runs.run import Run
from utils.runs.summary import report_classes, write_report
from utils.tasks.task import Task
from utils.training.evaluation import Evaluation, evaluate
from utils.training.trainer import Trainer

# --profile: steps to skip, to warm up, and to record.
PROFILE_WAIT, PROFILE_WARMUP, PROFILE_STEPS = 3, 2, 5


def train_classifier(
    run: Run, ready: ReadyModel, task: Task, checkpoint: Checkpoint | None
) -> None:
    """Trains as the settings ask for, from `checkpoint` on; or rehearses it, with --dry_run."""
    evaluated = task.val or task.test
    trainer = build_trainer(
        run, ready, task, checkpoint, evaluate=lambda: measure_split(run, ready, evaluated)
    )
    if trainer is None:
        return
    if run.settings.dry_run:
        rehearse(run, trainer, evaluated.samples, task.card)
    else:
        run_training(run, trainer, ready, task)


def measure_split(
    run: Run, ready: ReadyModel, loader, classes: int | None = None, flip: bool = False
) -> Evaluation | None:
    """Evaluates the model on the split of `loader`; see `evaluate`. None when a signal has come."""
    return evaluate(
        ready.model,
        loader.epoch(),
        run.precision,
        run.interrupted,
        classes=classes,
        exchange=run.exchange,
        flip=flip,
    )


def flip_text(evaluation: Evaluation) -> str:
    """The figures of --flip_test, for the console."""
    return (
        f"averaged with mirror images (--flip_test): loss {evaluation.flip_loss:.4f}, accuracy "
        f"{evaluation.flip_accuracy:.2f} %"
    )


def run_training(run: Run, trainer: Trainer, ready: ReadyModel, task: Task) -> None:
    """Trains to the end, measures on the test set, and writes the report."""
    settings, console, folder = run.settings, run.console, run.folder
    classes = task.data.classes

    def report(status: str, test: dict | None = None, further: dict | None = None) -> None:
        write_report(run, trainer, classes, status, test, task.summary_entries | (further or {}))

    _introduce(run, trainer)
    try:
        with _profiler(run, trainer) as profiler:
            progress = trainer.fit(profiler, run.free_cores)
    except StoppedBySignal:
        report("interrupted")
        raise

    if line := trainer.steps.summary():
        console.say(line)

    def measure_test_set(weights=contextlib.nullcontext, classes: int | None = None) -> Evaluation:
        """`weights`: makes the context in which the model holds the weights to be measured."""
        with weights():
            result = measure_split(run, ready, task.test, classes, settings.flip_test)
        if result is None:  # a signal; the finished run is saved already
            report("interrupted")
            raise StoppedBySignal(
                run.agreed_signal.signum,  # perhaps received by another rank
                "stopped before the last evaluation, all steps are saved; resume with "
                f"--resume {folder.path}",
            )
        return result

    status = "stopped_early" if progress.stopped_early else "finished"
    if not settings.final_test:
        report(status)
        console.say(
            f"validation accuracy {progress.evaluated['accuracy']:.2f} %, after "
            f"{_time_text(trainer)}: {folder.path}"
        )
        return
    at_end = progress.evaluated or {}
    epoch = progress.step / trainer.loader.steps_per_epoch
    tested = at_end.get("split") == "test" and at_end["step"] == progress.step
    if tested and not settings.report and not settings.flip_test:
        test = Evaluation(*(at_end[key] for key in ("loss", "accuracy", "samples")))
    else:
        console.say("measuring on the test set")
        test = measure_test_set(
            trainer.steps.evaluated_weights, len(classes) if settings.report else None
        )
        if not tested:
            trainer.log.metrics.write(step=progress.step, epoch=epoch, split="test", **test.figures)
    best = _measure_best(
        run,
        trainer,
        test,
        lambda: measure_test_set(classes=len(classes) if settings.report else None),
    )
    uses_best = best is not None and settings.use != "last"
    model = best if best is not None and uses_best else test
    if settings.report:
        report_classes(run, model, classes, folder.report)
    further = _prefixed("flip_test", test.flip_figures) | {
        "model_weights": "best" if uses_best else "average" if settings.ema_decay else "last",
        "model_step": progress.best_step if uses_best else progress.step,
        "model_test_accuracy": model.accuracy,
    }
    if best is not None:
        further |= _prefixed("best_test", best.figures)
        further |= _prefixed("best_flip_test", best.flip_figures)
    report(status, test.figures, further)
    if settings.flip_test:
        console.say(flip_text(test))
    finite = model.loss is not None and math.isfinite(model.loss)
    note = "" if finite else " (the loss is not finite)"
    if best is not None and progress.best_step != progress.step:
        at, other = epoch_text(progress.best_epoch), test if uses_best else best
        names = (f"the best weights, of epoch {at}", "the last weights")
        mine, theirs = names if uses_best else names[::-1]
        note += f" with {mine} ({theirs}: {other.accuracy:.2f} %)"
    console.say(
        f"test accuracy {model.accuracy:.2f} % on {counted(model.samples, 'sample')}{note}, after "
        f"{_time_text(trainer)}: {folder.path}"
    )


def _time_text(trainer: Trainer) -> str:
    text = f"{duration(trainer.progress.seconds_training)} of training"
    hours = trainer.log.hardware.summary(None)["gpu_hours"]
    return text if hours is None else f"{text} ({hours:.2f} GPU hours in all)"


def _introduce(run: Run, trainer: Trainer) -> None:
    resumed = f", from step {trainer.progress.step}" if trainer.progress.step else ""
    parameters = sum(p.numel() for p in trainer.steps.model.parameters())
    processes = ""
    if run.exchange.size > 1:
        processes = f" {run.exchange.size} processes ({run.settings.strategy}),"
    part = ""
    if trainer.freeze is not None:
        trained = sum(p.numel() for p in trainer.freeze.head_parameters())
        until = f" until epoch {trainer.freeze.until}" if trainer.freeze.until is not None else ""
        part = f", {trained / 1e6:.2f} M of them trained{until}"
    # With --batch_tokens it is the mean.
    about = "" if getattr(run.settings, "batch_tokens", None) is None else "about "
    run.console.say(
        f"{run.model_name} ({parameters / 1e6:.2f} M parameters{part}) on {run.data_name} "
        f"({counted(trainer.loader.samples, 'sample')}),{processes} {run.device.type} "
        f"{run.precision.name}, {about}{counted(trainer.loader.step_size, 'sample')} a step, "
        f"{counted(trainer.plan.total_steps, 'step')}{resumed}; run folder {run.folder.path}"
    )


def _prefixed(prefix: str, figures: dict) -> dict:
    """Loss and accuracy, where there are any, as entries of the summary."""
    return {f"{prefix}_{key}": figures[key] for key in ("loss", "accuracy") if key in figures}


def _measure_best(
    run: Run, trainer: Trainer, test_of_last: Evaluation, measure_test_set: Callable
) -> Evaluation | None:
    """Measures the weights that were best on the validation split, on the test set; None if there
    are none, or they cannot be read.

    Args:
        test_of_last: of the last weights, on the test set; used again if these are the best.
        measure_test_set: () -> Evaluation of the weights that the model holds.
    """
    progress = trainer.progress
    if progress.best_step is None:
        return None
    path, result = trainer.saver.store.path(progress.best_step), test_of_last
    if progress.best_step != progress.step:
        weights, failure = None, None
        try:
            weights = read_checkpoint(path).weights
        except (DamagedCheckpoint, UserError) as error:
            failure = str(error)
        # Measuring is collective: a rank that left it out would let the others wait.
        failure = next(filter(None, run.exchange.gather_json(failure)), None)
        if failure is not None:
            run.console.say(f"the best checkpoint, {path}, cannot be measured: {failure}")
            return None
        # Everything is saved, so the weights may be overwritten.
        trainer.steps.strategy.load(weights)
        result = measure_test_set()
        epoch = progress.step / trainer.loader.steps_per_epoch
        trainer.log.metrics.write(
            step=progress.step, epoch=epoch, split="test", model="best", **result.figures
        )
    run.console.say(
        f"best on the validation split: epoch {epoch_text(progress.best_epoch)} with "
        f"{progress.best_val_accuracy:.2f} %, on the test set {result.accuracy:.2f} %"
    )
    if run.settings.flip_test:
        run.console.say(f"the same weights, {flip_text(result)}")
    return result


@contextlib.contextmanager
def _profiler(run: Run, trainer: Trainer) -> Iterator[torch.profiler.profile | None]:
    """With --profile, traces a few steps into the run's folder."""
    if not run.settings.profile or not run.leads:
        yield None
        return
    path: Path = run.folder.trace
    written = []

    def write(profiler) -> None:
        written.append(path)
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            run.console.say(f"profile: {path} cannot be written ({error}); the run goes on")
            return
        run.console.say(f"profile: {path}, for https://ui.perfetto.dev or chrome://tracing")

    steps = trainer.plan.total_steps - trainer.progress.step
    wait, warmup = (
        (0, 1) if steps <= PROFILE_WAIT + PROFILE_WARMUP else (PROFILE_WAIT, PROFILE_WARMUP)
    )
    schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=PROFILE_STEPS, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write
    ) as profiler:
        yield profiler
    if not written:
        run.console.say(
            "profile: no trace, as too few steps are left in this run; it takes at least 3"
        )
