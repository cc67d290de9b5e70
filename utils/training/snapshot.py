"""What a checkpoint holds of a run, and how that is restored.

`Saver.save` adds two entries to its state: `Checkpoint.run_info` and the length of the metrics.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import Tensor

from utils.checkpoints.checkpoint import Checkpoint
from utils.checkpoints.optimizer_state import optimizer_tensors, restore_optimizer
from utils.checkpoints.random_state import random_states, restore_random_states
from utils.checkpoints.shards import divided_rows, is_by_element, own_tensors
from utils.checkpoints.worker_rows import as_one_model

if TYPE_CHECKING:
    from utils.training.train_step import TrainStep

FORMAT = 1  # of state.json


def snapshot(train_step: TrainStep) -> Checkpoint:
    """The present state of a run; the tensors are its own, not copies. Collective.

    Where parameters are divided, the tensors are those that this rank is to write.
    """
    strategy = train_step.strategy
    exchange, parameters = strategy.exchange, strategy.parameters
    names = {parameter: name for name, parameter in parameters.items()}
    tensors, optimizer = optimizer_tensors(train_step.optimizer, names)
    rows = divided_rows(exchange, parameters)
    gathered = exchange.gather_json([random_states(), bool(rows)])
    state = {
        "format": FORMAT,
        "progress": asdict(train_step.progress),
        "optimizer": optimizer,
        "schedule": train_step.schedule.state_dict(),
        "scaler": train_step.scaler.state_dict(),
        "random": [states for states, _ in gathered],
    }
    parts: dict = {
        "model": strategy.tensors(),
        "optimizer": tensors,
        "average": train_step.average and train_step.average.state_dict(),
        # Meta-mixup of the form "sample" has no state.
        "mixup": (train_step.meta and train_step.meta.state_dict()) or None,
    }
    step = train_step.progress.step
    if not any(is_divided for _, is_divided in gathered):
        return Checkpoint(step=step, state=state, **parts)
    rows_of_parts = {
        "model": rows,
        "optimizer": _optimizer_rows(tensors, rows, parameters),
        "average": rows,
        "mixup": {},
    }
    to_write: dict = {
        part: None if t is None else own_tensors(t, rows_of_parts[part], exchange.rank)
        for part, t in parts.items()
    }
    # It is not divided, so rank 0 alone has tensors of it to write: a file has one writer.
    to_write["mixup"] = to_write["mixup"] or None
    return Checkpoint(step=step, state=state, rows=rows_of_parts, **to_write)


def restore(train_step: TrainStep, checkpoint: Checkpoint) -> None:
    """Restores everything that `snapshot` has taken.

    Args:
        checkpoint: with whole tensors, whichever strategy wrote it.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    checkpoint, exchange = as_one_model(checkpoint), train_step.exchange
    names = {parameter: name for name, parameter in train_step.strategy.parameters.items()}
    train_step.strategy.load(checkpoint.model)
    state = checkpoint.state
    saved = checkpoint.optimizer, state["optimizer"]
    restore_optimizer(train_step.optimizer, names, *saved, exchange)
    train_step.schedule.load_state_dict(state.get("schedule", {}))
    if train_step.average is not None:
        # If the checkpoint has no average, the average starts from its weights.
        train_step.average.load_state_dict(checkpoint.weights)
    if train_step.meta is not None:
        train_step.meta.load_state_dict(checkpoint.mixup or {})
    if train_step.scaler.is_enabled() and state["scaler"]:
        train_step.scaler.load_state_dict(state["scaler"])
    restore_random_states(state["random"], exchange.rank, checkpoint.step)
    train_step.progress.load(state["progress"])
    train_step.load_sums()


def _optimizer_rows(tensors: dict[str, Tensor], rows: dict, parameters: dict[str, Tensor]) -> dict:
    """Rows of the state's tensors, `<parameter>/<key>`, that are divided like their parameter."""
    found = {}
    for name, tensor in tensors.items():
        parameter, _, entry = name.rpartition("/")
        if parameter in rows and is_by_element(entry, tensor, parameters[parameter].shape):
            found[name] = rows[parameter]
    return found
