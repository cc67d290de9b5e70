"""Checkpoints of which each rank writes a part: those of a model whose parameters are sharded
among the ranks (FSDP), and those of several workers (local steps).

Every rank writes the rows that it holds; rank 0 also writes what is not sharded:

    model.rank-00001-of-00004.safetensors, ...   likewise average and optimizer,
                                                 or, with local steps, workers
    state.json      also says where the rows belong, with zeros for the other dimensions:
        "shards": {file: {tensor: {"shape": [of the whole], "offset": [first row, 0, ...]}}}

Whole tensors are read back from any number of files, and each rank takes its rows.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..exchange import Exchange, Rows
from ..files import reason
from ..optim.table import OPTIMIZERS

# The files of a checkpoint with tensors; others in its folder are not its own.
PARTS = ("model", "optimizer", "average", "mixup", "workers", "outer")
FILE = re.compile(rf"state\.json|({'|'.join(PARTS)})(\.rank-\d{{5}}-of-\d{{5}})?\.safetensors")
# Those of which each rank writes its rows, where parameters are divided: their tensors are named
# `<parameter>` or `<parameter>/<key>`.
DIVIDED_PARTS = ("model", "optimizer", "average")
# Prefixes of the keys of optimizer state that belongs to a whole parameter, equal on all ranks.
OF_THE_WHOLE = tuple(key for entry in OPTIMIZERS.values() for key in entry.whole_state)


def divided_rows(exchange: Exchange, parameters: dict[str, Tensor]) -> dict[str, Rows]:
    """{name: rows} of the parameters of which this rank holds a part; empty if nothing is sharded.

    A parameter with so few rows that rank 0 holds them all is left out: it is not divided.
    """
    rows = {name: exchange.rows(parameter) for name, parameter in parameters.items()}
    return {
        name: own
        for name, own in rows.items()
        if own is not None and own.end - own.start < own.shape[0]
    }


def divided(
    parts: dict[str, dict[str, Tensor]], parameters: dict[str, Tensor], exchange: Exchange
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Rows]] | None]:
    """(what this rank has to write of these parts of a checkpoint, and `Checkpoint.rows`); all of
    it, and None, where the parameters are not divided among the ranks."""
    if exchange.size == 1 or not any(map(exchange.is_divided, parameters.values())):
        return parts, None
    of_parameters = divided_rows(exchange, parameters)
    rows: dict[str, dict[str, Rows]] = {part: {} for part in parts if part in DIVIDED_PARTS}
    for part, found in rows.items():
        for name, tensor in parts[part].items():
            owner, entry = (name, "") if name in of_parameters else name.rpartition("/")[::2]
            if owner in of_parameters and is_by_element(entry, tensor, parameters[owner].shape):
                found[name] = of_parameters[owner]
    own = {part: own_tensors(t, rows.get(part, {}), exchange.rank) for part, t in parts.items()}
    return own, rows


def is_by_element(entry: str, value: Tensor, shape: torch.Size) -> bool:
    """Whether an entry of the optimizer's state has a value for each element of its parameter, and
    so is sharded with it. Other entries (Fisher matrices, counters) are equal on all ranks.

    Args:
        entry: its key, such as "exp_avg".
        shape: of the parameter: of this rank's part if `value` is a part, else of the whole.
    """
    return value.ndim > 0 and value.shape == shape and not entry.startswith(OF_THE_WHOLE)


def own_tensors(tensors: dict[str, Tensor], rows: dict[str, Rows], rank: int) -> dict[str, Tensor]:
    """What this rank has to write: its rows, and on rank 0 also what is not sharded."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (len(tensor) > 0 if name in rows else rank == 0)
    }


def shard_name(part: str, rank: int, size: int) -> str:
    """Name of the file with the rows of `rank`."""
    return f"{part}.rank-{rank + 1:05}-of-{size:05}.safetensors"


def file_names(folder: Path, listed: bytes) -> set[str]:
    """Files of a checkpoint that exist or are listed in SHA256SUMS."""
    there = {path.name for path in folder.iterdir()}
    words = listed.decode(errors="replace").split()
    return {name for name in there.union(words) if FILE.fullmatch(name)}


def read_part(
    folder: Path, part: str, names: Iterable[str], shards: dict[str, dict]
) -> dict[str, Tensor]:
    """The whole tensors of one part, such as "model", sorted by name. Needs memory for them and for
    one more tensor.

    Args:
        names: of the checkpoint's files.
        shards: the entry "shards" of state.json.

    Raises:
        ValueError: rows are missing or duplicated.
    """
    own = sorted(name for name in names if name.startswith(f"{part}."))
    places = {name: shards.get(name, {}) for name in own}
    shapes = _whole_shapes(folder, part, places)
    tensors: dict[str, Tensor] = {}
    for name in own:
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118, no dict
                tensor, place = file.get_tensor(key), places[name].get(key)
                if place is None:
                    tensors[key] = tensor
                    continue
                start = place["offset"][0]
                if key not in tensors:
                    tensors[key] = torch.empty(shapes[key], dtype=tensor.dtype)
                tensors[key][start : start + len(tensor)] = tensor
    return dict(sorted(tensors.items()))


def _whole_shapes(folder: Path, part: str, places: dict[str, dict]) -> dict[str, list[int]]:
    """Shapes of the tensors of which the files hold rows, by name. They are what the files add up
    to, so that no memory is allocated for rows that state.json alone tells of.

    Raises:
        ValueError: rows are missing or duplicated.
    """
    pieces: dict[str, list[tuple[int, list[int], list[int]]]] = {}  # first row, shape, whole shape
    whole = set()
    for name, place_of in places.items():
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118, no dict
                place = place_of.get(key)
                if place is None:
                    whole.add(key)
                    continue
                shape = file.get_slice(key).get_shape()
                pieces.setdefault(key, []).append((place["offset"][0], shape, place["shape"]))
    shapes = {}
    for key, rows in pieces.items():
        fits, end, (_, *others) = key not in whole, 0, rows[0][1]
        for start, shape, _ in sorted(rows):
            fits &= [start, *shape[1:]] == [end, *others]
            end += shape[0]
        shapes[key] = [end, *others]
        if not fits or any(told != shapes[key] for _, _, told in rows):
            raise ValueError(f"{part}: rows of {key} are missing or duplicated")
    return shapes


def together(exchange: Exchange, action: Callable[[], Any]) -> list:
    """Runs `action` on each rank; returns the results (JSON values) of all ranks, in order.

    Raises:
        OSError: on every rank, if any rank raised one; the first of them.
        RuntimeError: a rank has died.
    """
    if exchange.size == 1:
        return [action()]
    result, failure = None, None
    try:
        result = action()
    except OSError as error:
        failure = [error.errno, f"{reason(error)} (rank {exchange.rank})"]
    told = exchange.gather_json([result, failure])
    for _, failure in told:
        if failure is not None:
            raise OSError(*failure)
    return [result for result, _ in told]
