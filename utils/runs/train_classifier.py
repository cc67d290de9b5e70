"""Prepares the model, trains it to the end, measures it on the test set, and writes the report."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

from utils.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint, read_checkpoint
from utils.distributed.strategies.base import build_strategy
from utils.distributed.sync_batch_norm import sync_batch_norms
from utils.errors import UserError
from utils.files import reason
from utils.fused import fuse, kernels
from utils.launch.signals import Stopped
from utils.reporting.classes import summary_lines, write_class_report
from utils.reporting.console import duration
from utils.reporting.run_folder import REPORT
from utils.runs.auto_batch import choose_micro_batch
from utils.runs.dry_run import rehearse
from utils.runs.make_trainer import build_trainer
from utils.runs.run import Run, another_is_best
from utils.runs.summary import write_report
from utils.training.evaluation import Evaluation, evaluate
from utils.training.freeze import Freeze
from utils.training.objective import Classification
from utils.training.trainer import Trainer
from utils.weights.pretrained import fit_weights

# --profile: steps to skip, to warm up, and to record.
PROFILE_WAIT, PROFILE_WARMUP, PROFILE_STEPS = 3, 2, 5


def train_classifier(run: Run, model, task, checkpoint: Checkpoint | None, pretrained=None) -> None:
    """Trains a classifier, or with --eval_only measures a trained one.

    Args:
        model: on the CPU; `HEAD` names its last layer; with a true `mixes_inside` its forward takes
            the mixing plan as second argument.
        task: see tasks/task.py.
        pretrained: weights to start from (see weights/pretrained.py).
    """
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    settings = run.settings
    if pretrained is not None:
        fit_weights(model, pretrained, run.console.say)
    model.to(run.device)
    freeze = None
    if settings.freeze_backbone:
        freeze = Freeze(model, model.HEAD, settings.unfreeze_epoch)
        if settings.unfreeze_epoch is None:
            freeze.apply(0)  # what never trains needs no optimizer state, nor communication
    fuse(model, settings.fused)
    if settings.fused != "none" and run.device.type == "cuda" and kernels.unusable():
        run.console.say(f"--fused {settings.fused} without its kernels: {kernels.unusable()}")
    if settings.fused == "memory" and run.device.type == "cpu" and settings.action.trains:
        run.console.say(
            "note: --fused memory is for GPUs; on a CPU it takes longer and the process becomes "
            "hardly smaller: leave it out, and where memory is short take --auto_batch"
        )

    def objective_of(called) -> Classification:
        return Classification(
            called,
            run.precision,
            settings.label_smoothing,
            mixing=settings.mixing != "none",
            clean_accuracy=settings.log_clean_accuracy,
            mixes_inside=getattr(model, "mixes_inside", False),
            fused=settings.fused != "none",
        )

    if settings.auto_batch and settings.resume is None:  # a resumed run keeps what was found
        choose_micro_batch(run, model, objective_of(model), freeze, task)
    if settings.sync_bn:
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise UserError(f"--sync_bn: {run.model_name} has no BatchNorm; leave it out")
        model = fuse(sync_batch_norms(model, run.exchange), settings.fused)
    run.strategy = build_strategy(settings.strategy, run.exchange)
    wrapped = run.strategy.wrap(model, unfreezes=settings.unfreeze_epoch is not None)
    if run.exchange.rank > 0:  # dropout differs between the ranks; the weights are equal by now
        torch.manual_seed(settings.seed + run.exchange.rank)

    def measure(loader, **options):
        return evaluate(
            model, loader.epoch(), run.precision, run.interrupted, exchange=run.exchange, **options
        )

    def test(**options):
        return measure(task.test, **options)

    if settings.eval_only:
        evaluate_only(run, model, checkpoint, test, task.data.classes)
        return
    trainer = build_trainer(
        run,
        model=model,
        freeze=freeze,
        build_objective=lambda engine: objective_of(engine.wrap(wrapped)),
        loader=task.train,
        measure=lambda: measure(task.val or task.test),
        eval_split="val" if task.val else "test",
        card=task.card,
        fingerprint=task.data.fingerprint,
        checkpoint=checkpoint,
    )
    if trainer is None:
        return
    if settings.dry_run:
        rehearse(run, trainer, (task.val or task.test).samples)
    else:
        run_training(run, trainer, test, task.data.classes, task.sizes)


def run_training(
    run: Run, trainer: Trainer, test: Callable, classes: list[str], sizes: dict
) -> None:
    """Trains to the end, measures on the test set, and writes the report.

    Args:
        test: (classes=None) -> Evaluation on the whole test set; given the number of classes, with
            the confusion matrix.
        classes: their names.
        sizes: entries of the summary about the data.
    """
    settings, console, folder = run.settings, run.console, run.folder
    _introduce(run, trainer)
    try:
        with _profiler(run, trainer):
            progress = trainer.fit()
    except Stopped:
        write_report(run, trainer, "interrupted", None, sizes)
        raise

    def measured(**options) -> Evaluation:
        with trainer.evaluated_weights():
            result = test(**options)
        if result is None:  # a signal; the finished training is saved already
            write_report(run, trainer, "interrupted", None, sizes)
            raise Stopped(
                run.signals.received,
                "stopped before the last evaluation, all steps are saved; go on with "
                f"--resume {folder.path}",
            )
        return result

    status = "stopped_early" if progress.stopped_early else "finished"
    if not settings.final_test:
        write_report(run, trainer, status, None, sizes)
        console.say(
            f"validation accuracy {progress.evaluated['accuracy']:.2f} %, after "
            f"{duration(progress.seconds_training)} of training: {folder.path}"
        )
        return
    at_end = progress.evaluated or {}
    epoch = progress.step / trainer.loader.steps_per_epoch
    if at_end.get("split") == "test" and at_end["step"] == progress.step and not settings.report:
        figures = {key: at_end[key] for key in ("loss", "accuracy", "samples")}
    else:
        console.say("measuring on the test set")
        evaluation = measured(classes=len(classes) if settings.report else None)
        figures = evaluation.figures
        if at_end.get("split") != "test" or at_end["step"] != progress.step:
            trainer.metrics.write(step=progress.step, epoch=epoch, split="test", **figures)
        if settings.report:
            _report_classes(run, evaluation, classes, folder.report)
    best = _measure_best(run, trainer, figures, measured)
    write_report(run, trainer, status, figures, sizes | best)
    finite = figures["loss"] is not None and math.isfinite(figures["loss"])
    console.say(
        f"test accuracy {figures['accuracy']:.2f} % on {figures['samples']:,} samples"
        f"{'' if finite else ' (the loss is not finite)'}, after "
        f"{duration(progress.seconds_training)} of training: {folder.path}"
    )


def _introduce(run: Run, trainer: Trainer) -> None:
    resumed = f", from step {trainer.progress.step}" if trainer.progress.step else ""
    parameters = sum(p.numel() for p in trainer.model.parameters())
    many = ""
    if run.exchange.size > 1:
        many = f" {run.exchange.size} processes ({run.settings.strategy}),"
    part = ""
    if trainer.freeze is not None:
        trained = sum(p.numel() for p in trainer.freeze.head.parameters())
        until = f" until epoch {trainer.freeze.until}" if trainer.freeze.until is not None else ""
        part = f", {trained / 1e6:.2f} M of them trained{until}"
    run.console.say(
        f"{run.model_name} ({parameters / 1e6:.2f} M parameters{part}) on {run.data_name} "
        f"({trainer.loader.samples:,} samples),{many} {run.device.type} {run.precision.name}, "
        f"batch {trainer.loader.step_size}, {trainer.total_steps} steps{resumed}; "
        f"run folder {run.folder.path}"
    )


def _measure_best(run: Run, trainer: Trainer, last: dict, measured: Callable) -> dict:
    """Measures the weights that were best on the validation split; entries of the summary.

    Args:
        last: the figures of the last weights.
    """
    progress = trainer.progress
    if progress.best_step is None:
        return {}
    path, result = run.folder.checkpoints / f"step-{progress.best_step:08}", last
    if progress.best_step != progress.step:
        try:
            weights = read_checkpoint(path).weights
        except DamagedCheckpoint as error:
            run.console.say(f"the best checkpoint, {path}, cannot be measured: {error}")
            return {}
        trainer.average = None  # all is saved, so the model may now hold other weights
        trainer.strategy.load(weights)
        result = measured().figures
        epoch = progress.step / trainer.loader.steps_per_epoch
        trainer.metrics.write(step=progress.step, epoch=epoch, split="test", model="best", **result)
    run.console.say(
        f"best on the validation split: epoch {progress.best_epoch:g} with "
        f"{progress.best_val_accuracy:.2f} %, on the test set {result['accuracy']:.2f} %"
    )
    return {"best_test_loss": result["loss"], "best_test_accuracy": result["accuracy"]}


def _report_classes(run: Run, evaluation: Evaluation, classes: list[str], folder: Path) -> None:
    for line in summary_lines(evaluation.confusion, classes):
        run.console.say(line)
    if not run.leads:
        return
    try:
        folder.mkdir(exist_ok=True)
        write_class_report(evaluation.confusion, classes, folder)
        run.console.say(f"accuracy of each class and confusion matrix: {folder}")
    except OSError as error:
        run.console.say(f"{folder}: {reason(error)}; the report is not complete")


@contextlib.contextmanager
def _profiler(run: Run, trainer: Trainer):
    """With --profile, traces a few steps into the run's folder."""
    if not run.settings.profile or not run.leads:
        yield
        return
    import torch

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

    steps = trainer.total_steps - trainer.progress.step
    wait, warmup = (PROFILE_WAIT, PROFILE_WARMUP) if steps > 5 else (0, 1)
    schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=PROFILE_STEPS, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write
    ) as profiler:
        trainer.profiler = profiler
        yield
    if not written:
        run.console.say("profile: no trace, the run has too few steps left; give it 3 or more")


def evaluate_only(run: Run, model, checkpoint: Checkpoint, test: Callable, classes) -> None:
    """Measures the weights of a checkpoint on the test set; changes nothing in the run's folder."""
    folder = run.resumed_folder()
    run.strategy.load(checkpoint.weights)
    result = test(classes=len(classes) if run.settings.report else None)
    if run.settings.report:
        _report_classes(run, result, classes, folder / REPORT)
    averaged = "" if checkpoint.average is None else " (averaged weights)"
    run.console.say(
        f"step {checkpoint.step}{averaged}: test loss {result.loss:.4f}, test accuracy "
        f"{result.accuracy:.2f} % on {result.samples:,} samples"
        f"{another_is_best(checkpoint, folder)}"
    )
