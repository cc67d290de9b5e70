"""`--dry_run`: builds everything, trains a few steps, and prints what the run would take."""

import shutil
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ..data.loader import Loader
from ..plural import counted
from ..reporting.console import duration
from ..reporting.run_folder import RUNS
from ..tasks.task import Task
from ..training.memory import peak_memory
from ..training.times import wait_for
from ..training.trainer import Trainer
from ..weights.card import ModelCard
from .batch_sheet import first_batch, write_sheet
from .run import Run

# At least WARM_STEPS steps come before the timed ones; timing ends after TIMED_STEPS steps or
# TIMED_SECONDS seconds, whichever comes first.
WARM_STEPS, TIMED_STEPS, TIMED_SECONDS = 2, 20, 15.0


class StepTimes(NamedTuple):
    """What `time_steps` measured."""

    first_seconds: float  # of the very first step
    seconds: float  # of all timed steps together
    steps: int  # timed
    samples: int  # in the timed steps
    warm_up_steps: int  # before the timed ones, which are faster


def rehearse(run: Run, trainer: Trainer, task: Task) -> None:
    """Trains up to TIMED_STEPS steps after WARM_STEPS, and prints what the run would take; of
    pictures, some are drawn on a sheet."""
    say, settings, loader = run.console.say, run.settings, trainer.loader
    evaluated_samples, card = (task.val or task.test).samples, task.card
    steps_left = trainer.plan.total_steps - trainer.progress.step
    times: StepTimes = trainer.within_memory(lambda: time_steps(trainer), save=False)
    step_seconds = times.seconds / times.steps
    epoch, left = (step_seconds * steps for steps in (loader.steps_per_epoch, steps_left))
    say(
        f"dry run: {counted(times.steps, 'step')} of {counted(loader.step_size, 'sample')} after "
        f"{times.warm_up_steps} to warm up"
    )
    say(f"  first step     {times.first_seconds:.1f} s")
    speed = times.samples / times.seconds
    say(f"  speed          {speed:,.0f} samples/s, {1000 * step_seconds:,.1f} ms a step")
    say(f"  an epoch       {duration(epoch)} ({counted(loader.steps_per_epoch, 'step')})")
    left_text = counted(steps_left, "step")
    if (budget := trainer.time_budget) is not None:
        most = min(steps_left, int(budget.seconds / step_seconds))
        say(f"  the run        {duration(budget.seconds)} in all: {counted(most, 'step')} at most")
    else:
        say(f"  the run        {duration(left)} of training ({left_text} left), without")
        say(f"                 evaluations ({counted(evaluated_samples, 'sample')} each)")
    for line in trainer.steps.forecast():
        say(line)
    say(f"  memory         {peak_memory(run.device) / 2**30:.2f} GiB at most{_of_gpu(run.device)}")
    checkpoints = settings.checkpoint_hist + 2  # the newest, the best, and the one being written
    needed, (place, free) = (
        checkpoints * _checkpoint_bytes(run.folder.checkpoints, trainer),
        _free_space(settings.output),
    )
    line = f"  disk           {needed / 2**20:,.0f} MiB for {checkpoints} checkpoints, "
    line += f"{free / 2**20:,.0f} MiB free in {place}"
    if free < needed:
        line += (
            ": NOT ENOUGH; make room, keep fewer (--checkpoint_hist), or choose another --output"
        )
    say(line)
    if isinstance(card, ModelCard) and run.leads:
        path = Path(f"{settings.output or RUNS / 'run'}-batch.png")
        say(f"  a batch        {_draw_batch(path, loader, card)}")
    say("dry run: no run was kept; decoded pictures, encoded texts or features stay in --cache_dir")


def _draw_batch(path: Path, loader: Loader, card: ModelCard) -> str:
    """Draws pictures of the first batch; returns where, or why not."""
    try:
        write_sheet(path, first_batch(loader), card)
    except OSError as error:
        return f"cannot be drawn to {path}: {error.strerror or error}"
    return f"as the network sees it: {path}"


def time_steps(trainer: Trainer) -> StepTimes:
    """Trains WARM_STEPS steps or more, until steps are as they will be in the run (see
    `Steps.settling`), and times those that follow."""
    # As in the last epoch, when everything that is ever unfrozen trains, which takes the most.
    trainer.prepare((trainer.plan.total_steps - 1) // trainer.loader.steps_per_epoch)
    trainer.steps.start()
    first_seconds, seconds, samples, warm_up = 0.0, [], 0, 0
    device = trainer.steps.precision.device
    end = time.monotonic()  # of the step before
    for batch in _batches(trainer):
        trainer.forward_backward(batch)
        if not batch.ends_step:
            continue
        trainer.update()
        wait_for(device)
        start, end = end, time.monotonic()
        first_seconds = first_seconds or end - start
        if warm_up < WARM_STEPS or trainer.steps.settling:
            warm_up += 1
            continue
        seconds.append(end - start)
        samples += batch.step_samples
        if len(seconds) == TIMED_STEPS or sum(seconds) > TIMED_SECONDS:
            break
    return StepTimes(first_seconds, sum(seconds), len(seconds), samples, warm_up)


def _batches(trainer: Trainer):
    """Batches of one epoch after another, without end."""
    epoch = 0
    while True:
        yield from trainer.steps.batches(trainer.loader, epoch)
        epoch += 1


def _of_gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return ", of this process"
    return f" of {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"


def _checkpoint_bytes(folder: Path, trainer: Trainer) -> int:
    """The size of a checkpoint; saves one into the temporary folder of the dry run."""
    trainer.save(final=True)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _free_space(output: str | None) -> tuple[Path, int]:
    """(the nearest existing folder at or above the run's folder, its free bytes)."""
    place = Path(output or RUNS)
    while not place.exists():
        place = place.parent
    return place, shutil.disk_usage(place).free
