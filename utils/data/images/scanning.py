"""Reads the headers of encoded pictures, in parallel, for an index (record_index.py)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import stat
import threading
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from operator import methodcaller
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from ...machine.spawn import SpawnContext
from ...plural import counted
from ..progress import progress_bar
from ..worker_process import SIGNALS
from .decode import in_order, measure, raise_transient, strict_pillow, why
from .image_data import PictureRequest
from .records import HEAD, RECORD, File

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

    files: list[File]
    labels: list[int] | None  # of the files; None: each record has its own

    def scan(self, root: str, thorough: bool) -> Scanned:
        """Reads the header of every record; if `thorough`, decodes every picture.

        Raises:
            UserError: the files cannot be read, or the format of a shard is broken.
        """


def scan_all(root: str, parts: Sequence[Part], request: PictureRequest) -> Generator[Scanned]:
    """What the parts hold, in order. Raises what `Part.scan` does, and BrokenProcessPool."""
    thorough = request.on_bad == "skip"
    files, size = _amount(parts)
    pool = _executor(parts, thorough, request.threads)
    scan = methodcaller("scan", root, thorough)
    line = f"indexing {counted(files, 'file')} ({size / 1e6:,.0f} MB), once"
    with (
        progress_bar(
            request.progress, line, desc="indexing", total=size, unit="B", unit_scale=True
        ) as bar,
        contextlib.closing(in_order(pool, scan, parts, 2 * request.threads)) as scanned,
    ):
        for part, found in zip(parts, scanned, strict=True):
            bar.update(_amount([part])[1])
            yield found


def _amount(parts: Sequence[Part]) -> tuple[int, int]:
    """The number of files, and their bytes."""
    sizes = [max(0, file.size) for part in parts for file in part.files]
    return len(sizes), sum(sizes)


def entry(source: BinaryIO, length: int, thorough: bool) -> tuple[int, int, int]:
    """(height, width, check) of a RECORD. Raises what `decode` does."""
    source.seek(0)
    check = zlib.crc32(source.read(HEAD))
    source.seek(0)
    return *measure(source, length, thorough), check


@dataclass(frozen=True)
class FolderPart:
    """Files of one picture each, and their labels."""

    files: list[File]
    labels: list[int]

    def scan(self, root: str, thorough: bool) -> Scanned:
        table, bad = [], []
        for number, (file, label) in enumerate(zip(self.files, self.labels, strict=True)):
            path = os.path.join(root, file.path)
            try:
                if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
                    raise ValueError("not a regular file")
                with open(path, "rb") as opened:
                    length = os.fstat(opened.fileno()).st_size
                    table.append((number, 0, length, label, *entry(opened, length, thorough)))
            except Exception as error:  # a damaged file can make Pillow raise any exception
                raise_transient(path, error)
                bad.append(Bad(path, why(error)))
        return Scanned(np.array(table, RECORD), bad)


def _executor(parts: Sequence[Part], thorough: bool, workers: int) -> Executor:
    """Threads, or processes where there is much to read."""
    files, size = _amount(parts)
    # A file of one picture whose header alone is read is little work, however large it is.
    by_size = thorough or any(part.labels is None for part in parts)
    if workers > 1 and len(parts) > 1 and (files > MANY_FILES or (by_size and size > MANY_BYTES)):
        return ProcessPoolExecutor(workers, SpawnContext(), _prepare_process)
    return ThreadPoolExecutor(workers, thread_name_prefix="index")


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
