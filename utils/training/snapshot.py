"""What a checkpoint holds of a training, and how it comes back."""

from dataclasses import asdict

import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.exchange import Exchange
from utils.training.checkpoint import Checkpoint, optimizer_tensors, restore_optimizer
from utils.training.progress import Progress
from utils.training.random_state import random_states, restore_random_states
from utils.training.shards import divided_rows, is_by_element, own_rows, own_tensors

FORMAT = 1  # of state.json


def snapshot(
    trainer, exchange: Exchange | None = None, parameters: dict[str, Tensor] | None = None
) -> Checkpoint:
    """The present state of a Trainer; the tensors are its own, not copies. Collective.

    Where parameters are divided, the tensors are those that this rank is to write.

    Args:
        exchange: of the ranks; None: one process.
        parameters: of the model, by canonical name, those that the optimizer holds: the rows of
            this rank where they are divided. None: the model's own.
    """
    exchange = exchange or Exchange()
    parameters = parameters or dict(trainer.model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    tensors, optimizer = optimizer_tensors(trainer.optimizer, names)
    rows = divided_rows(exchange, parameters)
    told = exchange.gather_objects([random_states(), bool(rows)])
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
        "model": trainer.model.state_dict() | {n: p.detach() for n, p in parameters.items()},
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


def restore(
    trainer,
    checkpoint: Checkpoint,
    exchange: Exchange | None = None,
    parameters: dict[str, Tensor] | None = None,
) -> Progress:
    """Puts everything of a Trainer back but its position, which is returned.

    Args:
        checkpoint: whole, whoever wrote it.
        exchange, parameters: as of `snapshot`.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    exchange = exchange or Exchange()
    parameters = parameters or dict(trainer.model.named_parameters())
    load_weights(trainer.model, checkpoint.model, exchange, parameters)
    names = {parameter: name for name, parameter in parameters.items()}
    state = checkpoint.state
    restore_optimizer(trainer.optimizer, names, checkpoint.optimizer, state["optimizer"], exchange)
    trainer.schedule.load_state_dict(state.get("schedule", {}))
    if trainer.average is not None:
        trainer.average.load_state_dict(own_rows(exchange, parameters, checkpoint.weights))
    if trainer.meta is not None:
        trainer.meta.load_state_dict(checkpoint.mixup or {})
    if trainer.scaler.is_enabled() and state["scaler"]:
        trainer.scaler.load_state_dict(state["scaler"])
    restore_random_states(state["random"], exchange.rank, checkpoint.step)
    return Progress(**state["progress"])


@torch.no_grad()
def load_weights(
    model: nn.Module, tensors: dict[str, Tensor], exchange: Exchange, parameters: dict[str, Tensor]
) -> None:
    """Puts whole tensors into a model of which this rank may have some rows.

    Args:
        tensors: of all its parameters and buffers.
        parameters: as of `snapshot`.

    Raises:
        UserError: they are of another model; nothing is changed.
    """
    own = model.state_dict() | parameters
    shapes = {
        name: exchange.shape(tensor) if name in parameters else tensor.shape
        for name, tensor in own.items()
    }
    wrong = [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"there is no {name} in the model" for name in tensors if name not in own]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, in the model {tuple(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"the checkpoint does not fit the model: {'; '.join(wrong[:3])}{more}")
    for name, tensor in own_rows(exchange, parameters, tensors).items():
        own[name].copy_(tensor)


def _optimizer_rows(tensors: dict[str, Tensor], rows: dict, parameters: dict[str, Tensor]) -> dict:
    """Of the state's tensors, `<parameter>/<key>`, those that are divided as their parameter."""
    found = {}
    for name, tensor in tensors.items():
        parameter, _, entry = name.rpartition("/")
        if parameter in rows and is_by_element(entry, tensor, parameters[parameter].shape):
            found[name] = rows[parameter]
    return found
