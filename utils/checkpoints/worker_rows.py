"""What a checkpoint of local steps holds (`--strategy local`).

    model, average    the mean of the workers, to be used as that of any run
    outer             the outer optimizer, with --sync_rule diloco: see averaging.py
    workers           the workers themselves: every tensor has a row for each, (workers, *shape),
                      and is named model/<tensor>, average/<tensor> or optimizer/<parameter>/<key>
    state["workers"]  the rest of each worker: counters of its optimizer, loss scale, metrics
    state["local"]    where in a round the run stands

Each process writes the rows of its workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..exchange import Exchange, Rows, add_in_order
from ..local.workers import Workers
from .checkpoint import Checkpoint
from .shards import is_by_element

MODEL, AVERAGE, OPTIMIZER = "model/", "average/", "optimizer/"
# What state["workers"] has of each; "window" and "left_out" are `window_sums` and `left_out` of a
# Progress, "distance" that from the mean at the last averaging.
OF_EACH = ("optimizer", "scaler", "window", "left_out", "distance")


def row(rows: dict[str, Tensor], prefix: str, number: int) -> dict[str, Tensor]:
    """The tensors of a worker whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor[number]
        for name, tensor in rows.items()
        if name.startswith(prefix)
    }


def of_workers(own: Sequence[Checkpoint], workers: Workers, exchange: Exchange) -> Checkpoint:
    """Combines the workers' checkpoints into one, whose model is still empty. Collective.

    Args:
        own: of this process's workers, as a TrainStep takes them, with OF_EACH in the state.
    """
    assert all(each.parts.keys() <= {"model", "average", "optimizer"} for each in own)
    tensors = [
        {f"{part}/{name}": t for part, found in each.parts.items() for name, t in found.items()}
        for each in own
    ]
    mine = [{key: each.state[key] for key in (*OF_EACH, "random")} for each in own]
    gathered = exchange.gather_json([mine, [sorted(each) for each in tensors]])
    states, names = (
        [x for process in each for x in process] for each in zip(*gathered, strict=True)
    )
    # A worker whose first step was left out has no optimizer state yet: then all start anew.
    common = set.intersection(*map(set, names))
    rows = {
        name: _stacked([each[name] for each in tensors]) for name in tensors[0] if name in common
    }
    state = {key: own[0].state[key] for key in ("format", "schedule")} | {
        **{key: states[0][key] for key in ("optimizer", "scaler")},
        "random": [random for each in states for random in each["random"]],
        "workers": [{key: each[key] for key in OF_EACH} for each in states],
    }
    checkpoint = Checkpoint(own[0].step, state, {"model": {}, "optimizer": {}, "workers": rows})
    if exchange.size > 1:
        first, end = workers.own.start, workers.own.stop
        checkpoint.rows = {
            "workers": {
                name: Rows(torch.Size((workers.size, *tensor.shape[1:])), first, end)
                for name, tensor in rows.items()
            }
        }
    return checkpoint


def of_worker(checkpoint: Checkpoint, number: int, size: int) -> Checkpoint:
    """What worker `number` of `size` has to restore, as the checkpoint of a process alone.

    Args:
        checkpoint: of as many workers, or, if all are to start from its model, from `as_one_model`.
    """
    state, rows = checkpoint.state, checkpoint.parts.get("workers", {})
    saved, progress = state.get("workers", []), {"step": checkpoint.step}
    if len(saved) == size:
        own = saved[number]
        model, optimizer = row(rows, MODEL, number), row(rows, OPTIMIZER, number)
        average = row(rows, AVERAGE, number)
        progress |= {"window_sums": own["window"], "left_out": own["left_out"]}
    else:
        own, model, optimizer = state, checkpoint.model, checkpoint.parts["optimizer"]
        average = checkpoint.parts.get("average", {})
        if saved:  # they were other workers
            own = saved[number % len(saved)]
            optimizer = row(rows, OPTIMIZER, number % len(saved)) | by_element(optimizer, model)
        if number == 0:  # totals over all workers
            totals = ("window_sums", "left_out")
            progress |= {k: v for k, v in state["progress"].items() if k in totals}
    parts = {"model": model, "optimizer": optimizer} | ({"average": average} if average else {})
    further = {"progress": progress, "optimizer": own["optimizer"], "scaler": own["scaler"]}
    return Checkpoint(checkpoint.step, state | further, parts)


def as_one_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as that of a single model. Its optimizer has the mean of what the workers'
    have for each element of a parameter, and in all else what the first worker's has. Unchanged if
    the checkpoint is of another strategy."""
    rows = checkpoint.parts.get("workers")
    if rows is None:
        return checkpoint
    moments = row(rows, OPTIMIZER, 0)
    means = {name: _mean(rows[OPTIMIZER + name]) for name in by_element(moments, checkpoint.model)}
    return replace(checkpoint, parts=checkpoint.parts | {"optimizer": moments | means})


def by_element(moments: dict[str, Tensor], model: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer state, `<parameter>/<key>`, that has a number for each element."""
    found = {}
    for name, tensor in moments.items():
        parameter, _, entry = name.rpartition("/")
        if tensor.is_floating_point() and is_by_element(entry, tensor, model[parameter].shape):
            found[name] = tensor
    return found


def _stacked(tensors: list[Tensor]) -> Tensor:
    """A row for each of the tensors, which are the run's own: a view of a single one; of several a
    copy, and on the host, since the device may have no memory for a second state."""
    if len(tensors) == 1:
        return tensors[0][None]
    return torch.stack([tensor.detach().cpu() for tensor in tensors])


def _mean(rows: Tensor) -> Tensor:
    """(workers, *shape) -> shape."""
    return (add_in_order(rows.flatten(1)) / len(rows)).view(rows.shape[1:])
