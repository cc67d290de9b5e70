"""`--dry_run`: builds everything, trains a few steps, and prints what the run would take."""

import importlib.util
import shutil
import time
from pathlib import Path

from utils.reporting.console import duration
from utils.reporting.run_folder import RUNS
from utils.runs.run import Run
from utils.training.memory import peak_memory
from utils.training.times import wait_for
from utils.training.trainer import Trainer

WARM_STEPS, TIMED_STEPS, TIMED_SECONDS = 2, 20, 15.0  # whichever limit comes first
# Optional packages -> the flags that need them.
OPTIONAL = {
    "wandb": "--wandb online or offline",
    "onnx": "--export onnx",
    "onnxscript": "--export onnx",
    "onnxruntime": "the check of --export onnx",
}


def rehearse(run: Run, trainer: Trainer, evaluated: int) -> None:
    """Trains up to TIMED_STEPS steps after WARM_STEPS, and prints what the run would take.

    Args:
        evaluated: samples in one evaluation.
    """
    say, settings, loader = run.console.say, run.settings, trainer.loader
    left = trainer.plan.total_steps - trainer.progress.step
    first, seconds, steps, samples, before = trainer.within_memory(
        lambda: time_steps(trainer), save=False
    )
    step = seconds / steps
    epoch = step * loader.steps_per_epoch
    say(f"dry run: {steps} steps of {loader.step_size} samples after {before} to warm up")
    say(f"  first step     {first:.1f} s")
    say(f"  speed          {samples / seconds:,.0f} samples/s, {1000 * step:,.1f} ms a step")
    say(f"  an epoch       {duration(epoch)} ({loader.steps_per_epoch:,} steps)")
    say(f"  the run        {duration(step * left)} of training ({left:,} steps left), without")
    say(f"                 evaluations ({evaluated:,} samples each)")
    say(f"  memory         {peak_memory(run.device) / 2**30:.2f} GiB at most{_of_gpu(run)}")
    needed, free, place = _disk(run, trainer)
    kept = settings.checkpoint_hist + 2  # the newest, the best, and the one being written
    line = f"  disk           {needed / 2**20:,.0f} MiB for {kept} checkpoints, "
    line += f"{free / 2**20:,.0f} MiB free in {place}"
    if free < needed:
        line += ": NOT ENOUGH; make room, keep fewer (--checkpoint_hist), or another --output"
    say(line)
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    for name in missing:
        say(f"  not installed  {name}, for {OPTIONAL[name]}: pip install {name}")
    if not missing:
        say("  packages       all optional ones are installed")
    say("dry run: nothing was kept")


def time_steps(trainer: Trainer) -> tuple[float, float, int, int, int]:
    """(seconds of the first step; seconds, number and samples of the timed steps; number of steps
    before or between them that are unlike those of the run)."""
    # As in the last epoch, when all that is ever unfrozen trains: it takes most time and memory.
    trainer.prepare((trainer.plan.total_steps - 1) // trainer.loader.steps_per_epoch)
    trainer.train_step.start()
    first, taken, samples, unlike = 0.0, [], 0, 0
    device = trainer.train_step.precision.device
    last = time.monotonic()
    for batch in _batches(trainer):
        trainer.forward_backward(batch)
        if not batch.ends_step:
            continue
        trainer.update()
        wait_for(device)
        before, last = last, time.monotonic()
        first = first or last - before
        if unlike < WARM_STEPS or trainer.stepper.settling:
            unlike += 1
            continue
        taken.append(last - before)
        samples += batch.step_samples
        if len(taken) == TIMED_STEPS or sum(taken) > TIMED_SECONDS:
            break
    return first, sum(taken), len(taken), samples, unlike


def _batches(trainer: Trainer):
    """Batches of one epoch after another, without end."""
    epoch = 0
    while True:
        yield from trainer.loader.epoch(epoch)
        epoch += 1


def _of_gpu(run: Run) -> str:
    if run.device.type != "cuda":
        return ", of this process"
    import torch

    return f" of {torch.cuda.get_device_properties(run.device).total_memory / 2**30:.1f} GiB"


def _disk(run: Run, trainer: Trainer) -> tuple[int, int, Path]:
    """(bytes that the checkpoints need, bytes that are free, the folder in question)."""
    trainer.save(final=True)  # into the temporary folder of the dry run
    size = sum(file.stat().st_size for file in run.folder.checkpoints.rglob("*") if file.is_file())
    place = Path(run.settings.output or RUNS)
    while not place.exists():
        place = place.parent
    return size * (run.settings.checkpoint_hist + 2), shutil.disk_usage(place).free, place
