"""An index of encoded pictures: where each record is, its class and its size.

Built once, in parallel, and memory-mapped by every later run. An index is a folder
`<cache_dir>/index-<key>/` with `<split>.npy` (the records), `<split>_files.npy` and `index.json`,
complete or absent (cache_folder.py). The key depends on each file's name, size and time of
modification.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import UserError
from ...files import write_synced
from ..cache_folder import built, write_array
from .decode import not_readable, strict_pillow
from .image_data import PictureRequest
from .records import RECORD, Records
from .scanning import SplitFiles, scan_all, tasks_of

VERSION = 3  # of the index; part of every key
FIRST = 10  # bad records that the index names


@dataclass(frozen=True)
class Index:
    """Content of `index.json`.

    Args:
        key: that the folder's name has, too.
        counts: split -> records.
        skipped: records left out; `skipped_first`: the first of them, with the reasons.
    """

    version: int
    key: str
    counts: dict[str, int]
    fingerprint: str
    skipped: int
    skipped_first: list[str]
    family: str = ""  # of earlier versions


class Found(NamedTuple):
    """An index that is there."""

    folder: Path
    index: Index  # type: ignore[assignment]  # not tuple's method `index`
    splits: dict[str, Records]


def find_index(root: Path, splits: dict[str, SplitFiles], request: PictureRequest) -> Found:
    """The index of these files, which is built if there is none. With `on_bad="skip"` every picture
    is decoded once, and bad ones are left out.

    Raises:
        UserError: a record is not a picture (unless `on_bad` is "skip"), a file is broken, or the
            index cannot be written.
    """
    key = _key(splits, request.on_bad)
    folder = request.cache_dir / f"index-{key}"

    def opened() -> Found | None:
        found = _open(folder, root)
        return found if found is not None and found.index.key == key else None

    def write(temporary: Path) -> None:
        _write(temporary, root, splits, request, key)

    try:
        return opened() or built(folder, opened, write, "the index of the pictures")
    except BrokenProcessPool as error:
        raise UserError(
            "a process that indexed pictures died, most likely because there is too little memory: "
            "use fewer --workers"
        ) from error


def _open(folder: Path, root: Path) -> Found | None:
    """The index in `folder`; None if it is absent, damaged or of another version."""
    try:
        index = Index(**json.loads((folder / "index.json").read_text(encoding="utf-8")))
        splits = {name: Records(str(root), str(folder), name) for name in index.counts}
        for name, count in index.counts.items():
            table, files = splits[name].table, splits[name].files
            if table.shape != (count,) or table.dtype != RECORD or files.dtype.names is None:
                return None
    except (OSError, ValueError, TypeError, UserError):
        return None
    return Found(folder, index, splits) if index.version == VERSION else None


def _key(splits: dict[str, SplitFiles], on_bad: str) -> str:
    """SHA-256 of what the index depends on."""
    digest = hashlib.sha256(json.dumps([VERSION, on_bad]).encode())
    for split, files in splits.items():
        digest.update(f"\0{split}\0".encode())
        states = iter(files.states)
        for part in files.parts:
            digest.update(type(part).__name__.encode())
            digest.update(json.dumps(part.labels).encode())
            for name in part.names:
                state = next(states)
                digest.update(os.fsencode(f"{name}\0{state.size}\0{state.modified}\0"))
    return digest.hexdigest()


def _write(
    folder: Path, root: Path, splits: dict[str, SplitFiles], request: PictureRequest, key: str
) -> None:
    tasks = {split: tasks_of(files) for split, files in splits.items()}
    counts, skipped, digest = {}, [], hashlib.sha256()
    scanning = scan_all(str(root), [task for some in tasks.values() for task in some], request)
    with strict_pillow(), contextlib.closing(scanning) as scanned:
        for split, files in splits.items():
            tables = []
            for _ in tasks[split]:
                found = next(scanned)
                if found.bad and request.on_bad == "error":
                    raise not_readable(*found.bad[0])
                tables.append(found.table)
                skipped += [f"{record}: {problem}" for record, problem in found.bad]
            table = np.concatenate(tables)
            if not len(table):
                raise UserError(f"no readable picture is left in {root} for {split}")
            counts[split] = len(table)
            write_array(folder / f"{split}.npy", table)
            write_array(folder / f"{split}_files.npy", _file_table(files))
            digest.update(f"{split} {len(table)}\0".encode())
            for column in ("length", "label", "height", "width", "check"):
                digest.update(np.ascontiguousarray(table[column]))
    index = Index(VERSION, key, counts, digest.hexdigest(), len(skipped), skipped[:FIRST])
    write_synced(folder / "index.json", json.dumps(asdict(index), indent=1).encode())


def _file_table(files: SplitFiles) -> np.ndarray:
    names = [os.fsencode(name) for name in files.names]
    width = max(map(len, names))
    table = np.zeros(len(names), [("name", f"S{width}"), ("size", "<i8"), ("modified", "<i8")])
    table["name"] = names
    table["size"] = [state.size for state in files.states]
    table["modified"] = [state.modified for state in files.states]
    return table
