"""Checkpoints of a model whose parameters are divided among the ranks (FSDP).

Every rank writes the rows that it has, and the first one besides what is not divided:

    model.rank-00001-of-00004.safetensors, ...   likewise average and optimizer
    state.json      also has where the rows belong, with zeros for the other dimensions:
        "shards": {file: {tensor: {"shape": [of the whole], "offset": [first row, 0, ...]}}}

Whatever the number of files, whole tensors are read from them, and each rank takes its rows.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from utils.exchange import Exchange, Rows
from utils.files import reason
from utils.optim.table import OPTIMIZERS

DIVIDED_PARTS = ("model", "average", "optimizer")
FILE = re.compile(
    r"state\.json|((model|average|optimizer)(\.rank-\d{5}-of-\d{5})?|mixup)\.safetensors"
)
# Entries of optimizers' state, of any shape, that belong to the whole parameter, on every rank.
OF_THE_WHOLE = tuple(key for entry in OPTIMIZERS.values() for key in entry.whole_state)


def divided_rows(exchange: Exchange, parameters: dict[str, Tensor]) -> dict[str, Rows]:
    """Of the parameters of which this rank has a part; empty where nothing is divided.

    The first rank, which has rows of everything, may have all of a parameter of few rows; that is
    not in here, and no row of it is on another rank.
    """
    rows = {name: exchange.rows(parameter) for name, parameter in parameters.items()}
    return {
        name: own
        for name, own in rows.items()
        if own is not None and own.end - own.start < own.shape[0]
    }


def is_by_element(entry: str, value: Tensor, shape: torch.Size) -> bool:
    """Whether an entry of the optimizer's state has one value for each of its parameter's, and is
    divided like that. Others (Fisher matrices, counters) are the same on all ranks.

    Args:
        entry: its key, such as "exp_avg".
        shape: of the parameter: the part that lies beside `value`, or the whole with a whole one.
    """
    return value.ndim > 0 and value.shape == shape and not entry.startswith(OF_THE_WHOLE)


def own_tensors(tensors: dict[str, Tensor], rows: dict[str, Rows], rank: int) -> dict[str, Tensor]:
    """What this rank is to write: rows that it has, and on the first rank what is not divided."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (len(tensor) > 0 if name in rows else rank == 0)
    }


def shard_name(part: str, rank: int, size: int) -> str:
    """Of the file with rank's rows; "mixup" is never divided."""
    if part not in DIVIDED_PARTS:
        return f"{part}.safetensors"
    return f"{part}.rank-{rank + 1:05}-of-{size:05}.safetensors"


def file_names(folder: Path, listed: bytes) -> set[str]:
    """Files of a checkpoint that are there, or of which there is a sum."""
    there = {path.name for path in folder.iterdir()}
    words = listed.decode(errors="replace").split()
    return {name for name in there.union(words) if FILE.fullmatch(name)}


def read_part(
    folder: Path, part: str, names: Iterable[str], shards: dict[str, dict]
) -> dict[str, Tensor]:
    """The whole tensors of one part, such as "model", sorted by name. Of the rows of other ranks
    no more than one tensor's lies in memory besides.

    Args:
        names: of the checkpoint's files.
        shards: what state.json says of them.

    Raises:
        ValueError: rows are missing, or are there twice.
    """
    tensors: dict[str, Tensor] = {}
    found: dict[str, list[tuple[int, int]]] = {}  # the rows that were read, [first, end)
    for name in sorted(name for name in names if name.startswith(f"{part}.")):
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118, no dict
                tensor, place = file.get_tensor(key), shards.get(name, {}).get(key)
                if place is None:
                    tensors[key] = tensor
                    continue
                start = place["offset"][0]
                if key not in tensors:
                    tensors[key] = torch.empty(place["shape"], dtype=tensor.dtype)
                tensors[key][start : start + len(tensor)] = tensor
                found.setdefault(key, []).append((start, start + len(tensor)))
    for key, pieces in found.items():
        starts, ends = zip(*sorted(pieces), strict=True)
        if (*starts, len(tensors[key])) != (0, *ends):
            raise ValueError(f"{part}: rows of {key} are missing, or there twice")
    return dict(sorted(tensors.items()))


def together(exchange: Exchange, action: Callable[[], Any]) -> list:
    """What `action`, of each rank, returns (values of JSON), on all ranks, in their order.

    Raises:
        OSError: on every rank, if any raised one: the first of these.
        RuntimeError: a rank has died.
    """
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
