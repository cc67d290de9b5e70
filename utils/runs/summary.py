"""The report of a run: summary.json, curves.png, and the policy that meta-mixup has learned."""

import platform
from pathlib import Path

import torch

from utils.files import reason, replace_file
from utils.reporting.classes import draw_mean_lambda, summary_lines, write_class_report
from utils.reporting.metrics import to_json
from utils.reporting.plots import draw_curves, save_figure
from utils.runs.run import Run
from utils.training.evaluation import Evaluation
from utils.training.memory import peak_memory
from utils.training.trainer import Trainer


def write_report(
    run: Run, trainer: Trainer, classes: list[str], status: str, test: dict | None, further: dict
) -> None:
    """Writes the report. If the disk is full, the report is incomplete, but the run goes on.

    Args:
        classes: their names.
        status: "finished", "stopped_early" or "interrupted".
        test: loss, accuracy and samples on the test set; None: not measured.
        further: entries of the summary about the data and other measurements.
    """
    if not run.leads:
        return
    progress, settings = trainer.progress, run.settings
    test, train = test or {}, progress.train or {}
    speed = trainer.samples_per_second
    summary = {
        "status": status,
        "entry": settings.entry,
        "model": run.model_name,
        "dataset": run.data_name,
        "optimizer": settings.optimizer,
        "mixup": settings.mixing_name,
        "mixing_strength": trainer.mixing_control and trainer.mixing_control.strength.current,
        "epochs": progress.step / trainer.loader.steps_per_epoch,
        "steps": progress.step,
        "train_samples": trainer.loader.samples,
        "test_samples": test.get("samples"),
        "train_loss": train.get("loss"),
        "train_accuracy": train.get("accuracy_weighted", train.get("accuracy")),
        "test_loss": test.get("loss"),
        "test_accuracy": test.get("accuracy"),
        "seconds_total": round(trainer.clock.seconds_total, 3),
        "seconds_training": round(progress.seconds_training, 3),
        "seconds_first_step": round(trainer.clock.seconds_first_step, 3),
        "samples_per_second": speed and round(speed, 1),
        "peak_memory_bytes": peak_memory(run.device),
        "skipped_steps": progress.left_out.steps,
        "skipped_steps_by_scaler": progress.left_out.by_scaler,
        "world_size": run.exchange.size,
        "strategy": run.strategy_name,
        "global_batch_size": trainer.loader.step_size,
        "micro_batch_size": trainer.loader.micro_batch,
        "accumulation_steps": trainer.loader.accumulation,
        "device": _device_name(run.device),
        "precision": run.precision.name,
        "ema_decay": settings.ema_decay,
        "threads": run.threads,
        "torch_version": torch.__version__,
        "seed": settings.seed,
    } | trainer.log.hardware.summary(speed)
    summary |= further | trainer.steps.summary_entries()
    if progress.best_step is not None:
        summary |= {
            "best_epoch": progress.best_epoch,
            "best_val_accuracy": progress.best_val_accuracy,
        }
        best = trainer.saver.store.path(progress.best_step)
        if best.is_dir():
            summary["best_checkpoint"] = f"checkpoints/{best.name}"
    note = " (synthetic)" if further.get("synthetic") else ""
    title = f"{run.model_name} on {run.data_name}{note}, {settings.optimizer}"
    # Last: a run whose summary says finished or stopped_early counts as complete.
    text = to_json(summary, indent=2) + "\n"
    meta = trainer.steps.meta
    mean_lambda = None if meta is None else meta.mean_lambda()
    writers = [lambda: draw_curves(trainer.log.metrics.read(), run.folder.curves, title)]
    if mean_lambda is not None:
        policy = draw_mean_lambda(mean_lambda.numpy(), classes)
        writers += [lambda: save_figure(policy, run.folder.policy)]
    writers += [lambda: replace_file(run.folder.summary, text.encode())]
    for write in writers:
        try:
            write()
        except OSError as error:
            run.console.say(f"{run.folder.path}: {reason(error)}; the report is not complete")


def report_classes(run: Run, evaluation: Evaluation, classes: list[str], folder: Path) -> None:
    for line in summary_lines(evaluation.confusion, classes):
        run.console.say(line)
    if not run.leads:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_class_report(evaluation.confusion, classes, folder)
        run.console.say(f"accuracy of each class and confusion matrix: {folder}")
    except OSError as error:
        run.console.say(f"{folder}: {reason(error)}; the report is not complete")


def _device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.processor() or platform.machine()})"
