"""An index of encoded pictures: where each record is, its class and its size.

Built once, in parallel, and memory-mapped by every later run. An index is a folder
`<cache_dir>/index-<key>/` with `<split>.npy` (the records), `<split>_files.npy` and `index.json`,
complete or absent (cache_folder.py). The key depends on each file's name, size and time of
modification.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
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
from .decode import strict_pillow, unreadable
from .image_data import PictureRequest
from .records import RECORD, File, Records
from .scanning import Bad, Part, scan_all

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


def find_index(root: Path, splits: dict[str, list[Part]], request: PictureRequest) -> Found:
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


def _key(splits: dict[str, list[Part]], on_bad: str) -> str:
    """SHA-256 of what the index depends on."""
    digest = hashlib.sha256(json.dumps([VERSION, on_bad]).encode())
    for split, parts in splits.items():
        digest.update(f"\0{split}\0".encode())
        for part in parts:
            digest.update(type(part).__name__.encode())
            digest.update(json.dumps(part.labels).encode())
            for path, size, modified in part.files:
                digest.update(os.fsencode(f"{path}\0{size}\0{modified}\0"))
    return digest.hexdigest()


def _write(
    folder: Path, root: Path, splits: dict[str, list[Part]], request: PictureRequest, key: str
) -> None:
    counts, bad, digest = {}, list[Bad](), hashlib.sha256()
    scanning = scan_all(str(root), [*itertools.chain(*splits.values())], request)
    with strict_pillow(), contextlib.closing(scanning) as scanned:
        for split, parts in splits.items():
            tables, files = [], list[File]()
            for part, found in zip(parts, scanned, strict=False):  # other splits follow
                found.table["file"] += len(files)
                tables.append(found.table)
                files += part.files
                bad += found.bad
            if bad and request.on_bad == "error":
                continue  # other splits may have more
            table = np.concatenate(tables)
            if not len(table):
                raise UserError(f"no readable picture is left in {root} for {split}")
            counts[split] = len(table)
            write_array(folder / f"{split}.npy", table)
            write_array(folder / f"{split}_files.npy", _file_table(files))
            digest.update(f"{split} {len(table)}\0".encode())
            for column in ("length", "label", "height", "width", "check"):
                digest.update(np.ascontiguousarray(table[column]))
    if bad and request.on_bad == "error":
        raise unreadable(bad)
    skipped = [f"{record}: {problem}" for record, problem in bad[:FIRST]]
    index = Index(VERSION, key, counts, digest.hexdigest(), len(bad), skipped)
    write_synced(folder / "index.json", json.dumps(asdict(index), indent=1).encode())


def _file_table(files: list[File]) -> np.ndarray:
    rows = [(os.fsencode(path), size, modified) for path, size, modified in files]
    width = max(len(name) for name, *_ in rows)
    return np.array(rows, [("name", f"S{width}"), ("size", "<i8"), ("modified", "<i8")])
