"""A training run, from data to report."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..checkpoints.checkpoint import Checkpoint
from ..plural import counted
from ..reporting.console import duration
from ..tasks.kinds import Kind
from ..training.trainer import Trainer
from .dry_run import rehearse
from .make_trainer import make_plan, make_trainer
from .prepare import prepare
from .report import Report
from .resume import is_finished
from .run import Run

# --profile: steps to skip, to warm up, and to record.
PROFILE_WAIT, PROFILE_WARMUP, PROFILE_STEPS = 3, 2, 5


def train(run: Run, kind: Kind, checkpoint: Checkpoint | None) -> None:
    """Trains as the settings ask for, from `checkpoint` on; with --dry_run only a few steps."""
    ready = prepare(run, kind, checkpoint)
    plan = make_plan(run, ready, checkpoint)
    if checkpoint is not None and is_finished(run, checkpoint, plan):
        return
    trainer = make_trainer(run, ready, plan, checkpoint)
    if run.settings.dry_run:
        rehearse(run, trainer, ready.task)
        return
    report = Report(run, trainer, ready)
    trace = run.folder.trace if run.settings.profile and run.leads else None
    _introduce(run, trainer)
    if checkpoint is None:
        report.write_splits()
    elif trainer.progress.step < plan.total_steps:
        report.remove()  # it will not be about the run's weights any longer
    with report.if_interrupted(), _profiler(trace, trainer, run.console.say) as profiler:
        after_step = [] if profiler is None else [profiler.step]
        after_step += [] if run.free_cores is None else [run.free_cores.look]
        trainer.fit(after_step)
    report.finish()


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
    steps = counted(trainer.plan.total_steps, "step")
    if (budget := trainer.time_budget) is not None and not budget.plans:
        steps = f"{duration(budget.seconds)} in all"
    # With --batch_tokens it is the mean.
    about = "" if run.settings.batch_tokens is None else "about "
    run.console.say(
        f"{run.model_name} ({parameters / 1e6:.2f} M parameters{part}) on {run.data_name} "
        f"({counted(trainer.loader.samples, 'sample')}),{processes} {run.device.type} "
        f"{run.precision.name}, {about}{counted(trainer.loader.step_size, 'sample')} a step, "
        f"{steps}{resumed}; run folder {run.folder.path}"
    )


@contextlib.contextmanager
def _profiler(
    path: Path | None, trainer: Trainer, say: Callable[[str], None]
) -> Iterator[torch.profiler.profile | None]:
    """Traces a few steps into the file `path`; None: traces nothing."""
    if path is None:
        yield None
        return
    written = []

    def write(profiler) -> None:
        written.append(path)
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            say(f"profile: {path} cannot be written ({error}); the run goes on")
            return
        say(f"profile: {path}, for https://ui.perfetto.dev or chrome://tracing")

    steps = trainer.plan.total_steps - trainer.progress.step
    wait, warmup = (
        (0, 1) if steps <= PROFILE_WAIT + PROFILE_WARMUP else (PROFILE_WAIT, PROFILE_WARMUP)
    )
    schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=PROFILE_STEPS, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if trainer.steps.precision.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write
    ) as profiler:
        yield profiler
    if not written:
        say("profile: no trace, as too few steps are left in this run; it takes at least 3")
