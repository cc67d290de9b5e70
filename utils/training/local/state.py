"""What a checkpoint of local steps holds, and how it is restored.

    model, average    the mean of the workers, to be used as that of any run
    workers           the workers themselves: see utils/checkpoints/worker_rows.py
    outer             the outer optimizer, with --sync_rule diloco: see averaging.py
    state["workers"]  the rest of each worker: counters of its optimizer, loss scale, metrics
    state["local"]    where in a round the run stands

Each process writes the rows of its workers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.checkpoints.checkpoint import Checkpoint
from utils.checkpoints.optimizer_state import optimizer_tensors, restore_optimizer
from utils.checkpoints.random_state import random_states, restore_random_states
from utils.checkpoints.worker_rows import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    as_one_model,
    by_element,
    row,
)
from utils.exchange import Rows
from utils.plural import counted
from utils.training.progress import LeftOut, named_sums
from utils.training.snapshot import FORMAT

if TYPE_CHECKING:
    from utils.training.local.steps import LocalSteps, Worker


def snapshot(steps: LocalSteps) -> Checkpoint:
    """The present state, also inside a round; the tensors may be those of the run. Collective."""
    mean, exchange, workers = steps.mean(), steps.exchange, steps.workers
    own = [_tensors(steps, worker) for worker in steps.own]
    gathered = exchange.gather_json([_further_state(steps, worker) for worker in steps.own])
    states = [state for part in gathered for state in part]
    # A worker whose first step was left out has no optimizer state yet: then all start anew.
    named = exchange.gather_json([sorted(tensors) for tensors in own])
    common = set.intersection(*(set(names) for part in named for names in part))
    rows = {name: _stacked([each[name] for each in own]) for name in own[0] if name in common}
    state = {
        "format": FORMAT,
        "progress": asdict(steps.progress),
        "optimizer": states[0]["optimizer"],
        "schedule": steps.schedule.state_dict(),
        "scaler": states[0]["scaler"],
        "random": [each.pop("random") for each in states],
        "workers": states,
        "local": asdict(steps.rounds),
    }
    checkpoint = Checkpoint(steps.progress.step, {}, {}, state, workers=rows)
    if exchange.rank == 0:
        with steps.holding(mean.model):
            checkpoint.model = steps.strategy.tensors()
        checkpoint.outer = steps.averaging.state_dict()
        if mean.average is not None:
            with steps.holding(mean.average):
                checkpoint.average = steps.strategy.tensors()
    if exchange.size > 1:
        first, end = workers.own.start, workers.own.stop
        checkpoint.rows = {
            "workers": {
                name: Rows(torch.Size((workers.size, *tensor.shape[1:])), first, end)
                for name, tensor in rows.items()
            }
        }
    return checkpoint


def _stacked(tensors: list[Tensor]) -> Tensor:
    """A row for each of the tensors, which are the run's own: a view of a single one; of several a
    copy, and on the host, since the device may have no memory for a second state."""
    if len(tensors) == 1:
        return tensors[0][None]
    return torch.stack([tensor.detach().cpu() for tensor in tensors])


def _tensors(steps: LocalSteps, worker: Worker) -> dict[str, Tensor]:
    step = worker.step
    with steps.holding(worker.tensors):
        tensors = {MODEL + name: tensor for name, tensor in steps.strategy.tensors().items()}
    if step.average is not None:
        tensors |= {AVERAGE + name: mean for name, mean in step.average.mean.items()}
    moments, _ = optimizer_tensors(step.optimizer, _names(steps))
    return tensors | {OPTIMIZER + name: moment for name, moment in moments.items()}


def _further_state(steps: LocalSteps, worker: Worker) -> dict:
    """For JSON."""
    step = worker.step
    return {
        "optimizer": optimizer_tensors(step.optimizer, _names(steps))[1],
        "scaler": step.scaler.state_dict(),
        "random": random_states() if worker is steps.active else worker.random,
        "window": dict(zip(step.sum_names, step.window.tolist(), strict=True)),
        "left_out": step.guard.left_out.tolist(),
        "distance": worker.distance.item(),
    }


def _names(steps: LocalSteps) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in steps.strategy.parameters.items()}


def restore(steps: LocalSteps, checkpoint: Checkpoint) -> None:
    """Restores what `snapshot` has taken. From a checkpoint of another strategy, or of another
    number of workers, all workers start equal, from its model.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    state, size, step = checkpoint.state, steps.workers.size, checkpoint.step
    saved = state.get("workers", [])
    steps.progress.load(state["progress"])
    steps.schedule.load_state_dict(state.get("schedule", {}))
    steps.averaging.load_state_dict(checkpoint.outer, checkpoint.model)
    if len(saved) == size:
        for worker in reversed(steps.own):
            steps.turn_to(worker)
            _restore_own(steps, worker, checkpoint)
        steps.restore_rounds(_rounds(state), [LeftOut(*each["left_out"]) for each in saved])
        return
    one = as_one_model(checkpoint)
    for worker in reversed(steps.own):
        steps.turn_to(worker)
        _restore_equal(steps, worker, one)
    before = {"averagings": 0, "sent": 0.0, "first_step": step} | _rounds(state)
    before = {name: before[name] for name in ("averagings", "sent", "first_step")}
    left_out = [steps.progress.left_out] + [LeftOut()] * (size - 1)
    steps.restore_rounds(before | {"equal": True}, left_out)
    source = f"the mean of {counted(len(saved), 'worker')}" if saved else "one model"
    starts = "starts" if size == 1 else "start"
    steps.say(f"step {step} is of {source}: {counted(size, 'worker')} {starts} from it")


def _rounds(state: dict) -> dict:
    """`Rounds` of a run with local steps, else empty. Older checkpoints lack `sent`: it was 1 for
    each averaging."""
    rounds = state.get("local", {})
    return {"sent": float(rounds["averagings"])} | rounds if rounds else {}


def _restore_own(steps: LocalSteps, worker: Worker, checkpoint: Checkpoint) -> None:
    """Restores a worker, whose turn it is, from its own row."""
    number, step, rows = worker.number, worker.step, checkpoint.workers or {}
    own = checkpoint.state["workers"][number]
    model = row(rows, MODEL, number)
    steps.strategy.load(model)
    restore_optimizer(step.optimizer, _names(steps), row(rows, OPTIMIZER, number), own["optimizer"])
    if step.average is not None:
        step.average.load_state_dict(row(rows, AVERAGE, number) or model)
    _restore_further(steps, worker, checkpoint, own["scaler"])
    step.load_window(named_sums(own["window"]))
    step.guard.left_out.copy_(torch.tensor(own["left_out"]))
    worker.distance.fill_(own["distance"])


def _restore_equal(steps: LocalSteps, worker: Worker, one: Checkpoint) -> None:
    """Restores a worker, whose turn it is, from a single model.

    Args:
        one: from `as_one_model`.
    """
    number, step, state = worker.number, worker.step, one.state
    moments, optimizer, scaler = one.optimizer, state["optimizer"], state["scaler"]
    if saved := state.get("workers"):  # they were other workers
        other = number % len(saved)
        optimizer, scaler = saved[other]["optimizer"], saved[other]["scaler"]
        moments = row(one.workers or {}, OPTIMIZER, other) | by_element(moments, one.model)
    steps.strategy.load(one.model)
    restore_optimizer(step.optimizer, _names(steps), moments, optimizer)
    if step.average is not None:
        step.average.load_state_dict(one.weights)
    _restore_further(steps, worker, one, scaler)
    step.clear_window()
    step.guard.left_out.copy_(torch.tensor(LeftOut()))
    worker.distance.zero_()
    if number == 0:  # totals over all workers
        step.load_window(steps.progress.window_sums)
        step.guard.left_out.copy_(torch.tensor(steps.progress.left_out))


def _restore_further(
    steps: LocalSteps, worker: Worker, checkpoint: Checkpoint, scaler: dict
) -> None:
    step = worker.step
    if step.scaler.is_enabled() and scaler:
        step.scaler.load_state_dict(scaler)
    torch.manual_seed(steps.seed + worker.number)  # for a worker without random states
    restore_random_states(checkpoint.state["random"], worker.number, checkpoint.step)
    step.progress.step = checkpoint.step
