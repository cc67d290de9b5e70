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
import signal
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from utils.data.cache_folder import LOCK, put_in_place, remove_abandoned, temporary_folder
from utils.data.images.decode import measure, strict_pillow, why
from utils.data.images.records import HEAD, RECORD, FileState, Records, not_readable
from utils.data.worker_process import SIGNALS
from utils.errors import UserError
from utils.files import reason, sync_folder, write_synced

VERSION = 1  # of the index; part of every key
# From this much work on, processes pay: headers are read in Python, which threads do one at a time.
MANY_FILES, MANY_BYTES = 20_000, 1 << 30
FIRST = 10  # bad records that the index names


class Scanned(NamedTuple):
    """What a part of a split holds."""

    table: np.ndarray  # (good records,) RECORD; `file` counts from the part's first file
    bad: list[tuple[str, str]]  # the others, for messages, with the reasons


class Part(Protocol):
    """Some files of a split, read by one task. Picklable."""

    names: list[str]  # of the files, relative to the root
    content: str  # bytes or headers: what `scan` reads

    def scan(self, root: str, thorough: bool) -> Scanned:
        """Reads the header of every record; if `thorough`, decodes every picture.

        Raises:
            UserError: the files cannot be read, or the format of a shard is broken.
        """


@dataclass(frozen=True)
class SplitFiles:
    """The files of a split, cut into parts, and what tells that a file has changed."""

    parts: list[Part]
    states: list[FileState]  # of all files, in order


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
    """Content of `index.json`. `skipped_first`: the first skipped records, with the reasons."""

    version: int
    counts: dict[str, int]  # split -> records
    fingerprint: str
    skipped: int
    skipped_first: list[str]


class Found(NamedTuple):
    """An index that is there."""

    folder: Path
    index: Index
    splits: dict[str, Records]


def find_index(root: Path, splits: dict[str, SplitFiles], how: Indexing) -> Found:
    """The index of these files, which is built if there is none.

    Raises:
        UserError: a record is not a picture (unless `on_bad` is "skip"), a file is broken, or the
            index cannot be written.
    """
    folder = how.cache_dir / f"index-{_key(splits, how.on_bad)}"
    found = _open(folder, root)
    if found is not None:
        return found
    try:
        how.cache_dir.mkdir(parents=True, exist_ok=True)
        remove_abandoned(how.cache_dir)
        with temporary_folder(how.cache_dir) as temporary:
            _write(temporary, root, splits, how)
            sync_folder(temporary)
            put_in_place(temporary, folder, lambda: _open(folder, root) is not None)
            sync_folder(how.cache_dir)
            (folder / LOCK).unlink(missing_ok=True)
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
    found = _open(folder, root)
    assert found is not None, f"the index {folder} cannot be read back"
    return found


def entry(source: BinaryIO, length: int, thorough: bool) -> tuple[int, int, int]:
    """(height, width, check) of a RECORD. Raises what `decode` does."""
    source.seek(0)
    check = zlib.crc32(source.read(HEAD))
    source.seek(0)
    return *measure(source, length, thorough), check


@dataclass(frozen=True)
class FolderPart:
    """Files of a folder, of one picture each.

    Args:
        names: relative to the root.
        labels: one for each.
    """

    names: list[str]
    labels: list[int]
    content = "headers"

    def scan(self, root: str, thorough: bool) -> Scanned:
        table, bad = np.zeros(len(self.names), RECORD), []
        good = np.ones(len(self.names), bool)
        for number, (name, label) in enumerate(zip(self.names, self.labels, strict=True)):
            path = os.path.join(root, name)
            try:
                if not os.path.isfile(path):  # opening a pipe would block
                    raise ValueError("not a regular file")
                with open(path, "rb") as file:
                    length = os.fstat(file.fileno()).st_size
                    height, width, check = entry(file, length, thorough)
                table[number] = number, 0, length, label, height, width, check
            except Exception as error:  # a damaged file can make Pillow raise any exception
                bad.append((path, why(error)))
                good[number] = False
        return Scanned(table[good], bad)


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
            digest.update(json.dumps(getattr(part, "labels", None)).encode())
            for name in part.names:
                state = next(states)
                digest.update(os.fsencode(f"{name}\0{state.size}\0{state.modified}\0"))
    return digest.hexdigest()


def _write(folder: Path, root: Path, splits: dict[str, SplitFiles], how: Indexing) -> None:
    tables, skipped = {}, []
    digest = hashlib.sha256()
    with _bar(splits, how) as bar, _executor(splits, how) as executor, strict_pillow():
        for split, files in splits.items():
            found = []
            first = 0
            for part, scanned in _scan(executor, str(root), files.parts, how):
                scanned.table["file"] += first
                if scanned.bad and how.on_bad == "error":
                    raise not_readable(*scanned.bad[0])
                skipped += [f"{record}: {problem}" for record, problem in scanned.bad]
                found.append(scanned.table)
                states = files.states[first : first + len(part.names)]
                bar.update(sum(max(0, state.size) for state in states))
                first += len(part.names)
            table = np.concatenate(found) if found else np.zeros(0, RECORD)
            if not len(table):
                raise UserError(f"no readable image is left in {root} for {split}")
            tables[split] = table
            _save(folder / f"{split}.npy", table)
            _save(folder / f"{split}_files.npy", _file_table(files))
            digest.update(f"{split} {len(table)}\0".encode())
            for key in ("length", "label", "height", "width", "check"):
                digest.update(np.ascontiguousarray(table[key]))
    index = Index(
        version=VERSION,
        counts={split: len(table) for split, table in tables.items()},
        fingerprint=digest.hexdigest(),
        skipped=len(skipped),
        skipped_first=skipped[:FIRST],
    )
    write_synced(folder / "index.json", json.dumps(asdict(index), indent=1).encode())


def _file_table(files: SplitFiles) -> np.ndarray:
    names = [os.fsencode(name) for part in files.parts for name in part.names]
    width = max(map(len, names))
    table = np.zeros(len(names), [("name", f"S{width}"), ("size", "<i8"), ("modified", "<i8")])
    table["name"] = names
    table["size"] = [state.size for state in files.states]
    table["modified"] = [state.modified for state in files.states]
    return table


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _scan(
    executor: Executor, root: str, parts: list[Part], how: Indexing
) -> Iterator[tuple[Part, Scanned]]:
    """Scans the parts in order, a few ahead."""
    thorough = how.on_bad == "skip"
    pending = []
    for part in parts:
        pending.append((part, executor.submit(part.scan, root, thorough)))
        if len(pending) > 2 * how.workers:
            part, future = pending.pop(0)
            yield part, future.result()
    for part, future in pending:
        yield part, future.result()


@contextlib.contextmanager
def _executor(splits: dict[str, SplitFiles], how: Indexing) -> Iterator[Executor]:
    """Threads, or processes where there is much to read."""
    files = sum(len(split.states) for split in splits.values())
    parts = [part for split in splits.values() for part in split.parts]
    size = sum(max(0, state.size) for split in splits.values() for state in split.states)
    read = how.on_bad == "skip" or parts[0].content == "bytes"
    if how.workers > 1 and len(parts) > 1 and (files > MANY_FILES or (read and size > MANY_BYTES)):
        executor = ProcessPoolExecutor(how.workers, get_context("spawn"), _prepare_process)
    else:
        executor = ThreadPoolExecutor(how.workers, thread_name_prefix="index")
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _prepare_process() -> None:
    """In an indexing process, which ends when the main one does."""
    strict_pillow().__enter__()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _bar(splits: dict[str, SplitFiles], how: Indexing) -> tqdm:
    size = sum(max(0, state.size) for split in splits.values() for state in split.states)
    files = sum(len(split.states) for split in splits.values())
    terminal = sys.stderr.isatty()
    if how.progress and not terminal:
        print(f"indexing {files:,} files ({size / 1e6:,.0f} MB), once", file=sys.stderr)
    return tqdm(
        desc="indexing",
        total=size,
        unit="B",
        unit_scale=True,
        disable=not (how.progress and terminal),
    )
