"""The records of a run: its settings, metrics and trackers."""

import shutil

from utils.checkpoints.checkpoint import Checkpoint, Checkpoints
from utils.errors import UserError
from utils.files import reason, replace_file
from utils.reporting.metrics import MetricsLog, NoMetrics
from utils.reporting.trackers import TensorBoard, Wandb
from utils.runs.run import Run, same_folder
from utils.settings.config import to_yaml
from utils.weights.card import ModelCard, TextCard


def open_metrics(
    run: Run, checkpoint: Checkpoint | None, card: ModelCard | TextCard
) -> MetricsLog | NoMetrics:
    """Writes the run's settings, and opens its metrics and trackers."""
    settings, folder = run.settings, run.folder
    source = run.resumed_folder()
    if not run.leads:
        return NoMetrics()
    try:
        if checkpoint is not None and not same_folder(source, folder.path):
            # This folder goes on from a run in another one. It gets the checkpoints that it needs
            # before its config.yaml, with which it counts as a run.
            store = Checkpoints(folder.checkpoints)
            for step in {checkpoint.step, checkpoint.state["progress"]["best_step"]} - {None}:
                store.adopt(source / "checkpoints", step)
            if (source / "metrics.jsonl").exists():
                shutil.copyfile(source / "metrics.jsonl", folder.metrics)
        trackers = [] if settings.dry_run else _trackers(run, checkpoint)
        metrics = MetricsLog(folder.metrics, warn=run.console.say, trackers=trackers)
        run.close_at_end(metrics)
        if checkpoint is None:
            metrics.cut(0)
        else:
            metrics.cut(checkpoint.state["metrics_bytes"], checkpoint.step)
        if isinstance(card, TextCard):
            replace_file(folder.tokenizer, card.tokenizer.encode())
        text = f"# {settings.entry}\n{to_yaml(settings, run.origin)}"
        replace_file(folder.config, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise UserError(f"--output {folder.path}: {reason(error)}") from None
    return metrics


def _trackers(run: Run, checkpoint: Checkpoint | None) -> list:
    settings, folder = run.settings, run.folder
    # The records of the checkpoint's own step are logged again (see MetricsLog.cut).
    purge_step = checkpoint.step if checkpoint else None
    trackers = [TensorBoard(folder.tensorboard, purge_step=purge_step, warn=run.console.say)]
    if settings.wandb != "disabled":
        tags = [tag.strip() for tag in (settings.wandb_tags or "").split(",") if tag.strip()]
        trackers.append(
            Wandb(
                mode=settings.wandb,
                project=settings.wandb_project,
                entity=settings.wandb_entity,
                name=folder.path.name,
                tags=tags,
                folder=folder.path,
                settings=vars(settings),
                warn=run.console.say,
            )
        )
    return trackers
