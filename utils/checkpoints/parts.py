"""What a checkpoint holds of a run: a list of parts, taken and restored one by one.

`Saver.save` adds two entries to the state: `Checkpoint.run_info` and the length of the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from utils.checkpoints.checkpoint import Checkpoint
from utils.checkpoints.shards import divided_rows, is_by_element, own_tensors
from utils.checkpoints.worker_rows import as_one_model
from utils.exchange import Exchange, Rows

FORMAT = 1  # of state.json


class Part(NamedTuple):
    """Something that is saved and restored."""

    name: str  # of its file (one of PARTS), if it has tensors; its key in state.json
    load: Callable[[Checkpoint], None]  # called with a checkpoint of whole tensors
    # () -> tensors by name, the run's own and not copies; None: it has none.
    tensors: Callable[[], dict[str, Tensor]] | None = None
    values: Callable[[], Any] | None = None  # () -> its other state, for JSON; None: it has none
    # Its tensors, `<parameter>` or `<parameter>/<key>`, are divided among the ranks where
    # parameters are.
    divided: bool = False


def take(
    parts: Sequence[Part], step: int, parameters: dict[str, Tensor], exchange: Exchange
) -> Checkpoint:
    """The present state after `step`; the tensors are the run's own. Where `parameters` are
    divided, they are those that this rank is to write. Collective."""
    tensors = {part.name: part.tensors() for part in parts if part.tensors is not None}
    values = {part.name: part.values() for part in parts if part.values is not None}
    checkpoint = Checkpoint(step, {"format": FORMAT} | values, tensors)
    if exchange.size > 1 and any(map(exchange.is_divided, parameters.values())):
        of_parameters = divided_rows(exchange, parameters)
        checkpoint.rows = {
            part.name: _rows(tensors[part.name], of_parameters, parameters)
            for part in parts
            if part.divided and part.name in tensors
        }
        checkpoint.parts = {
            name: own_tensors(found, checkpoint.rows.get(name, {}), exchange.rank)
            for name, found in tensors.items()
        }
    return checkpoint


def load(parts: Sequence[Part], checkpoint: Checkpoint) -> None:
    """Restores what `take` has taken.

    Args:
        checkpoint: with whole tensors, whichever strategy wrote it.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    checkpoint = as_one_model(checkpoint)
    for part in parts:
        part.load(checkpoint)


def _rows(
    tensors: dict[str, Tensor], of_parameters: dict[str, Rows], parameters: dict[str, Tensor]
) -> dict[str, Rows]:
    """{name: rows} of the tensors that are divided like their parameter."""
    found = {}
    for name, tensor in tensors.items():
        parameter, entry = (name, "") if name in of_parameters else name.rpartition("/")[::2]
        if parameter in of_parameters and is_by_element(entry, tensor, parameters[parameter].shape):
            found[name] = of_parameters[parameter]
    return found
