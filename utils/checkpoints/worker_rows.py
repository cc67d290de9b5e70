"""The part "workers" of a checkpoint of local steps (`--strategy local`), in which every tensor has
a row for each worker, (workers, *shape):

    model/<tensor>   average/<tensor>   optimizer/<parameter>/<key>

All else that belongs to a worker is in state["workers"]. See utils/training/local/state.py.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from utils.checkpoints.checkpoint import Checkpoint
from utils.checkpoints.shards import is_by_element
from utils.exchange import add_in_order

MODEL, AVERAGE, OPTIMIZER = "model/", "average/", "optimizer/"


def row(rows: dict[str, Tensor], prefix: str, number: int) -> dict[str, Tensor]:
    """The tensors of a worker whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor[number]
        for name, tensor in rows.items()
        if name.startswith(prefix)
    }


def as_one_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as that of a single model. Its optimizer has the mean of what the workers'
    have for each element of a parameter, and in all else what the first worker's has. Unchanged if
    the checkpoint is of another strategy."""
    if checkpoint.workers is None:
        return checkpoint
    moments = row(checkpoint.workers, OPTIMIZER, 0)
    means = {
        name: _mean(checkpoint.workers[OPTIMIZER + name])
        for name in by_element(moments, checkpoint.model)
    }
    return replace(checkpoint, optimizer=moments | means)


def by_element(moments: dict[str, Tensor], model: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer state, `<parameter>/<key>`, that has a number for each element."""
    found = {}
    for name, tensor in moments.items():
        parameter, _, entry = name.rpartition("/")
        if tensor.is_floating_point() and is_by_element(entry, tensor, model[parameter].shape):
            found[name] = tensor
    return found


def _mean(rows: Tensor) -> Tensor:
    """(workers, *shape) -> shape."""
    return (add_in_order(rows.flatten(1)) / len(rows)).view(rows.shape[1:])
