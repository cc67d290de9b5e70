"""The records of a run: its settings, metrics and trackers."""

import shutil
from collections.abc import Callable
from typing import Any

from ..checkpoints.checkpoint import Checkpoint, Checkpoints
from ..errors import UserError
from ..files import reason, replace_file
from ..reporting.metrics import MetricsLog, NoMetrics
from ..reporting.run_folder import RunFolder
from ..reporting.trackers import Mlflow, TensorBoard, Wandb, wandb_mode
from ..settings.config import to_yaml
from ..weights.card import ModelCard, TextCard
from .run import Run, same_folder


def open_metrics(
    run: Run, checkpoint: Checkpoint | None, card: ModelCard | TextCard
) -> MetricsLog | NoMetrics:
    """Writes the run's settings, and opens its metrics and trackers."""
    settings, folder = run.settings, run.folder
    source = run.resumed_folder()
    if not run.leads:
        return NoMetrics()
    # Trackers have the records up to this step already; those of another folder have none.
    step = checkpoint.step if checkpoint else 0
    try:
        if checkpoint is not None and not same_folder(source, folder.path):
            step = 0
            # This folder goes on from a run in another one. It gets the checkpoints that it needs
            # before its config.yaml, with which it counts as a run.
            store, others = Checkpoints(folder.checkpoints), Checkpoints(source / "checkpoints")
            best = others.existing_best(checkpoint.state["progress"]["best_step"], checkpoint.step)
            for needed in {checkpoint.step, best} - {None}:
                store.adopt(others.folder, needed)
            if (source / "metrics.jsonl").exists():
                shutil.copyfile(source / "metrics.jsonl", folder.metrics)
        trackers = [] if settings.dry_run else _trackers(settings, folder, step, run.console.say)
        metrics = MetricsLog(folder.metrics, warn=run.console.say, trackers=trackers)
        run.close_at_end(metrics)
        metrics.cut(checkpoint.state["metrics_bytes"] if checkpoint else 0, step)
        metrics.trackers += run.trackers  # which are not told again what they were told before
        for name, (content, _) in card.files().items():
            replace_file(folder.path / name, content)
        text = f"# {settings.entry}\n{to_yaml(settings, run.origin)}"
        replace_file(folder.config, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise UserError(f"--output {folder.path}: {reason(error)}") from None
    return metrics


def _trackers(settings, folder: RunFolder, step: int, say: Callable[[str], None]) -> list[Any]:
    # The records of `step` itself are logged again (see MetricsLog.cut).
    purge_step = step or None
    names, trackers = settings.trackers.split(","), list[Any]()
    if "tensorboard" in names:
        trackers.append(TensorBoard(folder.tensorboard, purge_step=purge_step, warn=say))
    if "mlflow" in names:
        trackers.append(Mlflow(folder.path, dict(vars(settings)), say))
    mode = wandb_mode(settings.wandb, say)
    if mode != "disabled":
        tags = [tag.strip() for tag in (settings.wandb_tags or "").split(",") if tag.strip()]
        trackers.append(
            Wandb(
                mode=mode,
                project=settings.wandb_project,
                entity=settings.wandb_entity,
                name=folder.path.name,
                tags=tags,
                folder=folder.path,
                settings=dict(vars(settings)),
                warn=say,
            )
        )
    return trackers
