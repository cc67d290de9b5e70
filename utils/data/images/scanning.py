"""Reads the headers of encoded pictures, in parallel, for an index (record_index.py)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import stat
import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from ...plural import counted
from ..groups import Groups
from ..progress import progress_bar
from ..worker_process import SIGNALS
from .decode import measure, raise_transient, strict_pillow, why
from .image_data import PictureRequest
from .records import HEAD, RECORD, FileState

# From this much work on, processes pay: headers are read in Python, which threads do one at a time.
MANY_FILES, MANY_BYTES = 20_000, 1 << 28


class Bad(NamedTuple):
    """A record that is not a picture."""

    record: str  # for messages
    problem: str


class Scanned(NamedTuple):
    """What the files of a part hold."""

    table: np.ndarray  # (good records,) RECORD; `file` counts from the part's first file
    bad: list[Bad]  # the others


class Part(Protocol):
    """Some files of a split, read by one task. Picklable."""

    names: list[str]  # of the files, relative to the root, or absolute
    labels: list[int] | None  # of the files; None: each record has its own

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
    groups: Groups | None = None  # likewise

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names]

    @classmethod
    def of_shards(cls, parts: list[Part], paths: Sequence[str | Path]) -> SplitFiles:
        """Each of the parts is one file, at these paths."""
        found = [os.stat(path) for path in paths]
        return cls(parts, [FileState(state.st_size, state.st_mtime_ns) for state in found])


class Task(NamedTuple):
    """A part to be scanned."""

    part: Part
    first: int  # number of its first file in the split
    size: int  # bytes


def tasks_of(files: SplitFiles) -> list[Task]:
    tasks, first = [], 0
    for part in files.parts:
        last = first + len(part.names)
        size = sum(max(0, state.size) for state in files.states[first:last])
        tasks.append(Task(part, first, size))
        first = last
    return tasks


def scan_all(root: str, tasks: list[Task], request: PictureRequest) -> Generator[Scanned]:
    """What the parts hold, in order; `file` counts the files of the split.

    Raises what `Part.scan` does, and BrokenProcessPool.
    """
    thorough, pending = request.on_bad == "skip", []

    def of_split(task: Task, scanned: Scanned) -> Scanned:
        scanned.table["file"] += task.first
        bar.update(task.size)
        return scanned

    files, size = sum(len(task.part.names) for task in tasks), sum(task.size for task in tasks)
    line = f"indexing {counted(files, 'file')} ({size / 1e6:,.0f} MB), once"
    with (
        progress_bar(
            request.progress, line, desc="indexing", total=size, unit="B", unit_scale=True
        ) as bar,
        _executor(tasks, thorough, request.threads) as executor,
    ):
        for task in tasks:
            pending.append((task, executor.submit(task.part.scan, root, thorough)))
            if len(pending) > 2 * request.threads:  # a few ahead
                task, future = pending.pop(0)
                yield of_split(task, future.result())
        for task, future in pending:
            yield of_split(task, future.result())


def entry(source: BinaryIO, length: int, thorough: bool) -> tuple[int, int, int]:
    """(height, width, check) of a RECORD. Raises what `decode` does."""
    source.seek(0)
    check = zlib.crc32(source.read(HEAD))
    source.seek(0)
    return *measure(source, length, thorough), check


@dataclass(frozen=True)
class FolderPart:
    """Files of one picture each.

    Args:
        names: relative to the root, or absolute.
        labels: one for each.
    """

    names: list[str]
    labels: list[int]

    def scan(self, root: str, thorough: bool) -> Scanned:
        table, bad = np.zeros(len(self.names), RECORD), []
        good = np.ones(len(self.names), bool)
        for number, (name, label) in enumerate(zip(self.names, self.labels, strict=True)):
            path = os.path.join(root, name)
            try:
                if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
                    raise ValueError("not a regular file")
                with open(path, "rb") as file:
                    length = os.fstat(file.fileno()).st_size
                    height, width, check = entry(file, length, thorough)
                table[number] = number, 0, length, label, height, width, check
            except Exception as error:  # a damaged file can make Pillow raise any exception
                raise_transient(path, error)
                bad.append(Bad(path, why(error)))
                good[number] = False
        return Scanned(table[good], bad)


@contextlib.contextmanager
def _executor(tasks: list[Task], thorough: bool, workers: int) -> Iterator[Executor]:
    """Threads, or processes where there is much to read."""
    files, size = sum(len(task.part.names) for task in tasks), sum(task.size for task in tasks)
    # A file of one picture whose header alone is read is little work, however large it is.
    by_size = thorough or any(task.part.labels is None for task in tasks)
    if workers > 1 and len(tasks) > 1 and (files > MANY_FILES or (by_size and size > MANY_BYTES)):
        executor: Executor = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _prepare_process
        )
    else:
        executor = ThreadPoolExecutor(workers, thread_name_prefix="index")
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _prepare_process() -> None:
    """In an indexing process, which ends when the main one does."""
    strict_pillow().__enter__()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The queue of tasks never ends for a process whose parent was killed: all indexing processes
    hold both its ends."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(0)  # without cleanup: nobody takes the results
