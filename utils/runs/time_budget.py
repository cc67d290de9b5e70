"""`--time_budget` as the settings ask for it."""

import contextlib
import itertools
import os
import time

from ..checkpoints.checkpoint import Checkpoint
from ..data.loader import Loader
from ..reporting.metrics import MetricsLog, NoMetrics
from ..reporting.plots import draw_curves
from ..settings.config import COMMAND_LINE, DEFAULT, FILE
from ..settings.run import budget_seconds
from ..tasks.task import Task
from ..training.evaluation import evaluate
from ..training.time_budget import TimeBudget, TimePlan
from ..training.times import Clock
from ..training.trainer import TrainingPlan
from ..training.views import PASSES
from .baseline import FRACTION, IMPORT_SECONDS
from .prepare import Ready
from .run import Run

# The most epochs without --epochs, and the batches by which an evaluation is estimated.
MOST_EPOCHS, TIMED_BATCHES = 300, 3
# What is left free at the end of an allocation of Slurm, at most.
SLURM_FRACTION, SLURM_SECONDS = 0.02, 20.0


def longest(run: Run, steps_per_epoch: int) -> tuple[int, str]:
    """(the steps that a run has at most, the flag that says so)."""
    settings = run.settings
    total_steps, limit = settings.epochs * steps_per_epoch, "--epochs"
    if not _limits(run, "epochs"):
        total_steps, limit = MOST_EPOCHS * steps_per_epoch, f"--epochs {MOST_EPOCHS}, the default"
    if _limits(run, "max_steps") and (settings.max_steps or total_steps) < total_steps:
        return settings.max_steps, "--max_steps"
    return total_steps, limit


def _limits(run: Run, name: str) -> bool:
    """Whether --epochs or --max_steps limits what --time_budget plans: not by default, nor those of
    a recipe beside a time on the command line."""
    if run.settings.time_budget is None:
        return True
    at, other = run.origin[name], run.origin["time_budget"]
    return at != DEFAULT and not (at == FILE and other == COMMAND_LINE)


def time_plans(settings, checkpoint: Checkpoint | None) -> list[TimePlan]:
    """Those of --time_budget in the checkpoint of a resumed run."""
    if settings.time_budget is None or checkpoint is None:
        return []
    return [TimePlan(*plan) for plan in checkpoint.state["progress"].get("time_plan") or ()]


def time_budget_of(
    run: Run, task: Task, plan: TrainingPlan, clock: Clock, checkpoint: Checkpoint | None
) -> TimeBudget:
    settings = run.settings
    seconds = budget_seconds(settings.time_budget)
    if seconds is None:
        left = int(os.environ["SLURM_JOB_END_TIME"]) - time.time()
        seconds = clock.seconds_total + left - min(SLURM_SECONDS, SLURM_FRACTION * left)
        # `clock` counts what was before the checkpoint once that is restored.
        seconds += checkpoint.state["progress"]["seconds_total"] if checkpoint else 0.0
    # A baseline takes no more of what is left.
    baseline = FRACTION * seconds if settings.baseline else 0.0
    return TimeBudget(
        seconds,
        lambda: clock.seconds_total,
        most_steps=plan.most_steps,
        most_text=f"more steps are not trained, by {plan.limit}",
        steps_per_epoch=task.train.steps_per_epoch,
        eval_every=settings.eval_every,
        end_evaluations=_evaluations_at_end(settings, task),
        end_seconds=baseline if baseline > IMPORT_SECONDS else 0.0,
        plans=time_plans(settings, checkpoint),
    )


def _evaluations_at_end(settings, task: Task) -> float:
    """At most, in evaluations of the split that is evaluated in training."""
    passes = PASSES[settings.eval_views]
    if task.val is None:
        return 1 if passes == 1 else 1 + passes  # for the views the test set is measured again
    tests = (2 if settings.eval_every else 1) * settings.final_test  # of the last weights, the best
    return bool(settings.eval_every) + tests * passes * task.test.samples / task.val.samples


def evaluation_seconds(run: Run, ready: Ready, loader: Loader) -> float:
    """Estimated from a few batches, of usual length if they are texts; the first one warms up."""
    count = len([*loader.pieces(0, 0)])
    middle = loader.steps_per_epoch // 2
    for few in (1, min(TIMED_BATCHES, len([*loader.pieces(0, middle)]))):
        start = time.monotonic()
        with contextlib.closing(loader.epoch(0, middle)) as batches:
            some = itertools.islice(batches, few)
            evaluate(ready.model, some, run.precision, exchange=run.exchange)
    return (time.monotonic() - start) / few * count


def rehearse_report(run: Run, metrics: MetricsLog | NoMetrics, ready: Ready) -> None:
    """Draws the curves so far, which takes about as long as all of the report: the first time
    matplotlib is imported."""
    if run.leads:
        with contextlib.suppress(OSError):
            title = f"{run.model_name} on {run.data_name}"
            draw_curves(metrics.read(), run.folder.curves, title, ready.measures.further, None)
