"""An index of encoded pictures: where each record is, its class and its size.

Built once, in parallel, and memory-mapped by every later run. An index is a folder
`<cache_dir>/index-<key>/` with `<split>.npy` (the records), `<split>_files.npy`, `bad.json` (the
records left out) and `index.json`, complete or absent (cache_folder.py). The key depends on each
file's name, size and time of modification. When some files have changed, a new index takes over
what an earlier one knows of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.array_file import write_array
from utils.data.cache_folder import built_folder
from utils.data.images.decode import strict_pillow
from utils.data.images.records import RECORD, Records, not_readable
from utils.data.images.scanning import Bad, Scanned, SplitFiles, Task, scan_all, tasks_of
from utils.errors import UserError
from utils.files import reason, write_synced

VERSION = 3  # of the index; part of every key
FIRST = 10  # bad records that the index names
BAD = "bad.json"  # split -> the Bad of all files


@dataclass(frozen=True)
class Indexing:
    """How an index is built.

    Args:
        cache_dir: folder of the indices.
        on_bad: "error", or "skip": every picture is decoded once, and bad ones are left out.
        workers: how many records are read at once.
        progress: show a bar on a terminal, or a plain line otherwise.
    """

    cache_dir: Path
    on_bad: str = "error"
    workers: int = 1
    progress: bool = True


@dataclass(frozen=True)
class Index:
    """Content of `index.json`.

    Args:
        key: that the folder's name has, too.
        family: equal for indices of the same data set before and after a change.
        counts: split -> records.
        skipped: records left out; `skipped_first`: the first of them, with the reasons.
    """

    version: int
    key: str
    family: str
    counts: dict[str, int]
    fingerprint: str
    skipped: int
    skipped_first: list[str]


class Found(NamedTuple):
    """An index that is there."""

    folder: Path
    index: Index  # type: ignore[assignment]  # not tuple's method `index`
    splits: dict[str, Records]


def find_index(root: Path, splits: dict[str, SplitFiles], how: Indexing) -> Found:
    """The index of these files, which is built if there is none.

    Raises:
        UserError: a record is not a picture (unless `on_bad` is "skip"), a file is broken, or the
            index cannot be written.
    """
    key = _key(splits, how.on_bad)
    folder = how.cache_dir / f"index-{key}"

    def opened() -> Found | None:
        found = _open(folder, root)
        return found if found is not None and found.index.key == key else None

    if found := opened():
        return found
    try:
        with built_folder(folder, lambda: opened() is not None) as temporary:
            _write(temporary, root, splits, how, key)
    except OSError as error:
        raise UserError(
            f"cannot write the index of the pictures in {how.cache_dir}: {reason(error)}; choose "
            "another folder with --cache_dir"
        ) from error
    except BrokenProcessPool as error:
        raise UserError(
            "a process that indexed pictures died, most likely because there is too little memory: "
            "use fewer --workers"
        ) from error
    found = opened()
    assert found is not None, f"the index {folder} cannot be read back"
    return found


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


def _family(root: Path, splits: dict[str, SplitFiles], on_bad: str) -> str:
    kinds = {split: type(files.parts[0]).__name__ for split, files in splits.items()}
    return hashlib.sha256(json.dumps([VERSION, str(root), on_bad, kinds]).encode()).hexdigest()


def _write(
    folder: Path, root: Path, splits: dict[str, SplitFiles], how: Indexing, key: str
) -> None:
    family = _family(root, splits, how.on_bad)
    known = _known(_earlier(how.cache_dir, root, family), splits)
    tasks = {split: tasks_of(files, known[split].files) for split, files in splits.items()}
    tables, bad = {}, {}
    digest = hashlib.sha256()
    scanning = scan_all(
        str(root),
        [task for tasks_of_split in tasks.values() for task in tasks_of_split],
        thorough=how.on_bad == "skip",
        workers=how.workers,
        progress=how.progress,
    )
    with strict_pillow(), contextlib.closing(scanning) as scanned:
        for split, files in splits.items():
            table, bad[split] = _joined(known[split].scanned, scanned, tasks[split], how.on_bad)
            if not len(table):
                raise UserError(f"no readable picture is left in {root} for {split}")
            tables[split] = table
            write_array(folder / f"{split}.npy", table)
            write_array(folder / f"{split}_files.npy", _file_table(files))
            digest.update(f"{split} {len(table)}\0".encode())
            for column in ("length", "label", "height", "width", "check"):
                digest.update(np.ascontiguousarray(table[column]))
    skipped = [f"{one.record}: {one.problem}" for split in splits for one in bad[split]]
    index = Index(
        version=VERSION,
        key=key,
        family=family,
        counts={split: len(table) for split, table in tables.items()},
        fingerprint=digest.hexdigest(),
        skipped=len(skipped),
        skipped_first=skipped[:FIRST],
    )
    write_synced(folder / BAD, json.dumps(bad).encode())
    write_synced(folder / "index.json", json.dumps(asdict(index), indent=1).encode())


def _joined(
    known: Scanned, scanned: Iterator[Scanned], tasks: list[Task], on_bad: str
) -> tuple[np.ndarray, list[Bad]]:
    """What is known of a split and what is scanned now, in the order of its files."""
    tables, bad = [known.table], list(known.bad)
    for _ in tasks:
        found = next(scanned)
        if found.bad and on_bad == "error":
            raise not_readable(found.bad[0].record, found.bad[0].problem)
        tables.append(found.table)
        bad += found.bad
    table = np.concatenate(tables)
    return table[np.argsort(table["file"], kind="stable")], sorted(bad, key=lambda one: one.file)


def _file_table(files: SplitFiles) -> np.ndarray:
    names = [os.fsencode(name) for name in files.names]
    width = max(map(len, names))
    table = np.zeros(len(names), [("name", f"S{width}"), ("size", "<i8"), ("modified", "<i8")])
    table["name"] = names
    table["size"] = [state.size for state in files.states]
    table["modified"] = [state.modified for state in files.states]
    return table


# ---- what an earlier index knows -----------------------------------------------------------------


class Known(NamedTuple):
    """What need not be scanned again."""

    files: np.ndarray  # (files of the split,) bool
    scanned: Scanned  # of these; `file` counts the files of the split


def _earlier(cache_dir: Path, root: Path, family: str) -> Found | None:
    """The newest other index of the data set, if there is one."""
    folders = [path.parent for path in cache_dir.glob("index-*/index.json")]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True):
        found = _open(folder, root)
        if found is not None and found.index.family == family:
            return found
    return None


def _known(earlier: Found | None, splits: dict[str, SplitFiles]) -> dict[str, Known]:
    nothing = Scanned(np.zeros(0, RECORD), [])
    none = {
        split: Known(np.zeros(len(files.states), bool), nothing) for split, files in splits.items()
    }
    if earlier is None:
        return none
    try:
        bad = json.loads((earlier.folder / BAD).read_text(encoding="utf-8"))
        return {
            split: _known_of_split(earlier.splits[split], [Bad(*one) for one in bad[split]], files)
            for split, files in splits.items()
        }
    except (OSError, ValueError, TypeError, KeyError, IndexError):  # it is damaged
        return none


def _known_of_split(earlier: Records, bad: list[Bad], files: SplitFiles) -> Known:
    columns = (earlier.files[column].tolist() for column in ("name", "size", "modified"))
    numbers = {state: number for number, state in enumerate(zip(*columns, strict=True))}
    before = np.full(len(files.states), -1)  # the number of each file in the earlier index
    for number, (name, state) in enumerate(zip(files.names, files.states, strict=True)):
        if state.size >= 0:
            before[number] = numbers.get((os.fsencode(name), *state), -1)
    now = np.flatnonzero(before >= 0)
    place = np.arange(len(earlier.files) + 1)
    starts = np.searchsorted(earlier.table["file"], place)  # of each file's records
    first, counts = starts[:-1][before[now]], np.diff(starts)[before[now]]
    ends = np.cumsum(counts)
    rows = np.arange(counts.sum()) + np.repeat(first - (ends - counts), counts)
    table = np.array(earlier.table[rows])
    table["file"] = np.repeat(now, counts)
    if (labels := files.labels) is not None:
        table["label"] = np.array(labels)[table["file"]]
    bad_of: dict[int, list[Bad]] = {}
    for one in bad:
        bad_of.setdefault(one.file, []).append(one)
    found = [
        one._replace(file=number)
        for number in (now.tolist() if bad else ())
        for one in bad_of.get(int(before[number]), ())
    ]
    return Known(before >= 0, Scanned(table, found))
