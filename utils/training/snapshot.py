"""What a checkpoint holds of a training, and how it comes back."""

from dataclasses import asdict

from utils.errors import UserError
from utils.training.checkpoint import Checkpoint, optimizer_tensors, restore_optimizer
from utils.training.progress import Progress
from utils.training.random_state import random_states, restore_random_states

FORMAT = 1  # of state.json


def snapshot(trainer) -> Checkpoint:
    """The present state of a Trainer; the tensors are its own, not copies."""
    names = {parameter: name for name, parameter in trainer.strategy.parameters.items()}
    tensors, optimizer = optimizer_tensors(trainer.optimizer, names)
    state = {
        "format": FORMAT,
        "progress": asdict(trainer.progress),
        "optimizer": optimizer,
        "schedule": trainer.schedule.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": random_states(),
        "settings": trainer.saved_settings,
    }
    average = trainer.average and trainer.average.state_dict()
    # A form that learns nothing lasting has nothing to save.
    mixup = (trainer.meta and trainer.meta.state_dict()) or None
    model = trainer.strategy.tensors()
    return Checkpoint(trainer.progress.step, model, tensors, state, average, mixup)


def restore(trainer, checkpoint: Checkpoint) -> Progress:
    """Puts everything of a Trainer back but its position, which is returned.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    try:
        trainer.strategy.load(checkpoint.model)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise UserError(f"the checkpoint does not fit the model: {detail}") from None
    names = {parameter: name for name, parameter in trainer.strategy.parameters.items()}
    state = checkpoint.state
    restore_optimizer(trainer.optimizer, names, checkpoint.optimizer, state["optimizer"])
    trainer.schedule.load_state_dict(state.get("schedule", {}))
    if trainer.average is not None:
        trainer.average.load_state_dict(checkpoint.weights)
    if trainer.meta is not None:
        trainer.meta.load_state_dict(checkpoint.mixup or {})
    if trainer.scaler.is_enabled() and state["scaler"]:
        trainer.scaler.load_state_dict(state["scaler"])
    restore_random_states(state["random"])
    return Progress(**state["progress"])
