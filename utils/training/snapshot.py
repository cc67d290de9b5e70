"""What a checkpoint holds of a training, and how it comes back."""

from dataclasses import asdict

from torch import Tensor

from utils.checkpoints.checkpoint import Checkpoint, optimizer_tensors, restore_optimizer
from utils.checkpoints.random_state import random_states, restore_random_states
from utils.checkpoints.shards import divided_rows, is_by_element, own_tensors
from utils.training.progress import Progress

FORMAT = 1  # of state.json


def snapshot(trainer) -> Checkpoint:
    """The present state of a Trainer; the tensors are its own, not copies. Collective.

    Where parameters are divided, the tensors are those that this rank is to write.
    """
    exchange, parameters = trainer.strategy.exchange, trainer.strategy.parameters
    names = {parameter: name for name, parameter in parameters.items()}
    tensors, optimizer = optimizer_tensors(trainer.optimizer, names)
    rows = divided_rows(exchange, parameters)
    told = exchange.gather_json([random_states(), bool(rows)])
    state = {
        "format": FORMAT,
        "progress": asdict(trainer.progress),
        "optimizer": optimizer,
        "schedule": trainer.schedule.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": [states for states, _ in told],
        "settings": trainer.saved_settings,
    }
    parts = {
        "model": trainer.strategy.tensors(),
        "optimizer": tensors,
        "average": trainer.average and trainer.average.state_dict(),
        # A form that learns nothing lasting has nothing to save.
        "mixup": (trainer.meta and trainer.meta.state_dict()) or None,
    }
    step = trainer.progress.step
    if not any(divided for _, divided in told):
        return Checkpoint(step=step, state=state, **parts)
    by_part = {
        "model": rows,
        "optimizer": _optimizer_rows(tensors, rows, parameters),
        "average": rows,
        "mixup": {},
    }
    own = {
        part: None if t is None else own_tensors(t, by_part[part], exchange.rank)
        for part, t in parts.items()
    }
    own["mixup"] = own["mixup"] or None  # the first rank's alone
    return Checkpoint(step=step, state=state, rows=by_part, **own)


def restore(trainer, checkpoint: Checkpoint) -> Progress:
    """Puts everything of a Trainer back but its position, which is returned.

    Args:
        checkpoint: whole, whoever wrote it.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    exchange = trainer.strategy.exchange
    names = {parameter: name for name, parameter in trainer.strategy.parameters.items()}
    trainer.strategy.load(checkpoint.model)
    state = checkpoint.state
    restore_optimizer(trainer.optimizer, names, checkpoint.optimizer, state["optimizer"], exchange)
    trainer.schedule.load_state_dict(state.get("schedule", {}))
    if trainer.average is not None:
        trainer.average.load_state_dict(checkpoint.weights)
    if trainer.meta is not None:
        trainer.meta.load_state_dict(checkpoint.mixup or {})
    if trainer.scaler.is_enabled() and state["scaler"]:
        trainer.scaler.load_state_dict(state["scaler"])
    restore_random_states(state["random"], exchange.rank, checkpoint.step)
    return Progress(**state["progress"])


def _optimizer_rows(tensors: dict[str, Tensor], rows: dict, parameters: dict[str, Tensor]) -> dict:
    """Of the state's tensors, `<parameter>/<key>`, those that are divided as their parameter."""
    found = {}
    for name, tensor in tensors.items():
        parameter, _, entry = name.rpartition("/")
        if parameter in rows and is_by_element(entry, tensor, parameters[parameter].shape):
            found[name] = rows[parameter]
    return found
