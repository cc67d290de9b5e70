"""One training, from the settings to the report: the trainer built, run to its end, measured."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from utils.advice import phase_advice
from utils.config import to_yaml
from utils.errors import UserError
from utils.files import reason, replace_file
from utils.model_card import ModelCard
from utils.optim.factory import build_optimizer
from utils.optim.schedules import build_schedule
from utils.report import write_report
from utils.reporting.classes import summary_lines, write_class_report
from utils.reporting.console import duration
from utils.reporting.metrics import MetricsLog
from utils.reporting.trackers import TensorBoard, Wandb
from utils.run import Run, same
from utils.settings.optimization import milestone_epochs
from utils.settings.run import save_interval
from utils.signals import Stopped
from utils.training.average import Average
from utils.training.checkpoint import Checkpoint, Checkpoints, DamagedCheckpoint, read_checkpoint
from utils.training.evaluation import Evaluation
from utils.training.freeze import Freeze
from utils.training.guard import Guard
from utils.training.saver import Saver
from utils.training.trainer import Trainer

# --profile: steps left out, to warm up, and written.
PROFILE_WAIT, PROFILE_WARMUP, PROFILE_STEPS = 3, 2, 5


def build_trainer(
    run: Run,
    *,
    model,
    head: str,
    objective,
    loader,
    measure: Callable[..., Evaluation | None],
    eval_split: str,
    card: ModelCard,
    fingerprint: str,
    checkpoint: Checkpoint | None,
) -> Trainer | None:
    """A Trainer with everything that the settings say, put back to `checkpoint`.

    Args:
        model: on its device, with the weights to start from; `head` is its last layer.
        loader: of the training split.
        measure: () -> Evaluation on the split `eval_split`, "val" or "test".
        card: what it takes to use the model; goes into every checkpoint.
        fingerprint: of the data, likewise.

    Returns None, and says so, where the run is finished already.
    """
    settings, folder = run.settings, run.folder
    if eval_split != "val":
        for flag in _needs_validation(settings):
            raise UserError(
                f"{flag} decides by a validation split, never by the test set: give "
                "--val_fraction 0.1 (say)"
            )
    total_steps, limit = settings.epochs * loader.steps_per_epoch, "--epochs"
    if settings.max_steps is not None and settings.max_steps < total_steps:
        total_steps, limit = settings.max_steps, "--max_steps"
    if checkpoint is not None and _is_finished(run, checkpoint, total_steps, limit):
        return None
    span = total_steps
    if settings.epochs_for_sched is not None:
        span = settings.epochs_for_sched * loader.steps_per_epoch
    schedule = _schedule(run, span, loader.steps_per_epoch, checkpoint)
    guard = Guard(model)
    freeze = None
    if settings.freeze_backbone:
        freeze = Freeze(model, head, settings.unfreeze_epoch)
        if settings.unfreeze_epoch is None:
            freeze.apply(0)  # what never trains needs no optimizer state
    metrics = _open_metrics(run, checkpoint)
    save_steps, save_seconds = save_interval(settings.save_every)
    store = Checkpoints(folder.checkpoints, keep=settings.checkpoint_hist, warn=run.console.say)
    trainer = Trainer(
        model=model,
        objective=objective,
        optimizer=build_optimizer(
            settings.optimizer,
            model,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            decay_all=settings.decay_all,
        ),
        schedule=schedule,
        loader=loader,
        precision=run.precision,
        total_steps=total_steps,
        evaluate=measure,
        eval_split=eval_split,
        eval_every=settings.eval_every,
        console=run.console,
        metrics=metrics,
        saver=Saver(store, metrics, run.console, save_steps, save_seconds),
        signals=run.signals,
        guard=guard,
        clip=settings.clip,
        on_nonfinite=settings.on_nonfinite,
        log_every=settings.log_every,
        average=None if settings.ema_decay is None else Average(model, settings.ema_decay),
        freeze=freeze,
        early_stop_patience=settings.early_stop_patience,
        advice=phase_advice(settings, run),
        saved_settings={
            "entry": settings.entry,
            "data": card.to_dict(),
            "data_fingerprint": fingerprint,
            "schedule_steps": span,
            "threads": run.threads,
            **run.engine(),
        },
    )
    trainer.started = run.started
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer


def _needs_validation(settings) -> list[str]:
    flags = ["--early_stop_patience"] if settings.early_stop_patience is not None else []
    return flags + (["--sched plateau"] if settings.sched == "plateau" else [])


def _schedule(run: Run, span: int, steps_per_epoch: int, checkpoint: Checkpoint | None):
    """The schedule over `span` optimizer steps; says where a resumed run leaves its old plan."""
    settings = run.settings
    warmup_steps = settings.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(settings.warmup_epochs * steps_per_epoch)
    if warmup_steps >= span:
        run.console.say(f"note: the warm-up ({warmup_steps} steps) takes the whole schedule")

    def build(steps: int):
        return build_schedule(
            settings.sched,
            lr=settings.lr,
            total_steps=steps,
            steps_per_epoch=steps_per_epoch,
            warmup_steps=warmup_steps,
            min_lr=settings.min_lr,
            gamma=settings.gamma,
            step_epochs=settings.step_epochs,
            milestones=milestone_epochs(settings.milestones),
            plateau_patience=settings.plateau_patience,
        )

    schedule = build(span)
    before = checkpoint and checkpoint.state["settings"].get("schedule_steps", span)
    if before and before != span and settings.sched != "plateau":
        step = checkpoint.step
        now, then = (settings.lr * plan.factor(step) for plan in (schedule, build(before)))
        keep = f"; --epochs_for_sched {before // steps_per_epoch} keeps the old plan"
        run.console.say(
            f"note: the {settings.sched} schedule spans {span} steps now and spanned {before}: the "
            f"learning rate goes on with {now:.3g}, where the old plan has {then:.3g}"
            f"{keep if before % steps_per_epoch == 0 else ''}"
        )
    return schedule


def _open_metrics(run: Run, checkpoint: Checkpoint | None) -> MetricsLog:
    """The run's settings written down, and its metrics and trackers ready to go on."""
    settings, folder = run.settings, run.folder
    try:
        text = f"# {settings.entry}\n{to_yaml(settings, run.origin)}"
        replace_file(folder.config, text.encode(errors="surrogateescape"))
        source = run.resumed_folder()
        if checkpoint is not None and not same(source, folder.path):
            shutil.copyfile(source / "metrics.jsonl", folder.metrics)
        trackers = [] if settings.dry_run else _trackers(run, checkpoint)
        metrics = MetricsLog(folder.metrics, warn=run.console.say, trackers=trackers)
        run.closing(metrics)
        metrics.cut(checkpoint.state["metrics_bytes"] if checkpoint else 0)
    except OSError as error:
        raise UserError(f"--output {folder.path}: {reason(error)}") from None
    return metrics


def _trackers(run: Run, checkpoint: Checkpoint | None) -> list:
    settings, folder = run.settings, run.folder
    purge_step = checkpoint.step + 1 if checkpoint else None
    trackers = [TensorBoard(folder.tensorboard, purge_step=purge_step, warn=run.console.say)]
    if settings.wandb != "disabled":
        tags = [tag.strip() for tag in (settings.wandb_tags or "").split(",") if tag.strip()]
        trackers.append(
            Wandb(
                mode=settings.wandb,
                project=settings.wandb_project,
                name=folder.path.name,
                tags=tags,
                folder=folder.path,
                settings=vars(settings),
                warn=run.console.say,
            )
        )
    return trackers


def _is_finished(run: Run, checkpoint: Checkpoint, total_steps: int, limit: str) -> bool:
    """Whether the run that is resumed has nothing left to do; says so."""
    step, path = checkpoint.step, run.folder.path
    if step > total_steps:
        raise UserError(
            f"the run in {run.settings.resume} has done {step} steps and {limit} asks for "
            f"{total_steps}: give more, or start a new run with --output"
        )
    try:
        summary = json.loads(run.folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    patience, since = run.settings.early_stop_patience, checkpoint.state["progress"]["since_best"]
    stopped_early = patience is not None and since >= patience
    if summary.get("status") not in ("finished", "stopped_early"):
        return False
    if step < total_steps and not stopped_early:
        return False
    how, more = ("has stopped early", "--early_stop_patience") if step < total_steps else (
        "is finished", limit
    )  # fmt: skip
    run.console.say(
        f"this run {how}: {summary['epochs']:g} epochs, test accuracy "
        f"{summary['test_accuracy']:.2f} % in {path}; a larger {more} goes on with it"
    )
    return True


def run_training(
    run: Run, trainer: Trainer, test: Callable, classes: list[str], sizes: dict
) -> None:
    """Trains to the end, measures on the test set, and reports.

    Args:
        test: (classes=None) -> Evaluation, on the whole test set; with the number of classes
            also the confusion matrix.
        classes: names.
        sizes: what the summary says about the data besides.
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
            _report_classes(run, evaluation, classes)
    best = _measure_best(run, trainer, figures, measured)
    status = "stopped_early" if progress.stopped_early else "finished"
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
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    part = f", {trained / 1e6:.2f} M of them trained" if trained < parameters else ""
    run.console.say(
        f"{run.model_name} ({parameters / 1e6:.2f} M parameters{part}) on {run.data_name} "
        f"({trainer.loader.samples:,} samples), {run.device.type} {run.precision.name}, "
        f"batch {trainer.loader.step_size}, {trainer.total_steps} steps{resumed}; "
        f"run folder {run.folder.path}"
    )


def _measure_best(run: Run, trainer: Trainer, last: dict, measured: Callable) -> dict:
    """The weights that were best on the validation split, on the test set, for the summary.

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
        trainer.average = None  # all is saved: the model may hold other weights from here on
        trainer.model.load_state_dict(weights)
        result = measured().figures
        trainer.metrics.write(
            step=progress.best_step, epoch=progress.best_epoch, split="test", model="best", **result
        )
    run.console.say(
        f"best on the validation split: epoch {progress.best_epoch:g} with "
        f"{progress.best_val_accuracy:.2f} %, on the test set {result['accuracy']:.2f} %"
    )
    return {"best_test_loss": result["loss"], "best_test_accuracy": result["accuracy"]}


def _report_classes(run: Run, evaluation: Evaluation, classes: list[str]) -> None:
    for line in summary_lines(evaluation.confusion, classes):
        run.console.say(line)
    try:
        run.folder.report.mkdir(exist_ok=True)
        write_class_report(evaluation.confusion, classes, run.folder.report)
    except OSError as error:
        run.console.say(f"{run.folder.report}: {reason(error)}; the report is not complete")


@contextlib.contextmanager
def _profiler(run: Run, trainer: Trainer):
    """With --profile a few steps are traced into the run's folder."""
    if not run.settings.profile:
        yield
        return
    import torch

    path: Path = run.folder.trace
    written = []

    def write(profiler) -> None:
        profiler.export_chrome_trace(str(path))
        written.append(path)
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
    """Measures the weights of a checkpoint on the test set; the run stays as it is."""
    model.load_state_dict(checkpoint.weights)
    result = test(classes=len(classes) if run.settings.report else None)
    if run.settings.report:
        for line in summary_lines(result.confusion, classes):
            run.console.say(line)
    averaged = "" if checkpoint.average is None else " (averaged weights)"
    run.console.say(
        f"step {checkpoint.step}{averaged}: test loss {result.loss:.4f}, test accuracy "
        f"{result.accuracy:.2f} % on {result.samples:,} samples"
    )
