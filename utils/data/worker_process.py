"""A worker process: reads or decodes batches, augments them and puts them into shared memory.

Nothing here imports PyTorch, so that a worker starts at once and takes little memory.
"""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from mmap import mmap
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import UserError
from .shared_ring import Ring

# Ignored by workers, which receive them too from a terminal or a scheduler: the training process
# needs its workers to finish the step. They end when it does.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_map(images: np.ndarray) -> bool:
    """Whether `images` is a whole memory map of a file, which a worker can open again."""
    return isinstance(images, np.memmap) and isinstance(images.base, mmap)


class Request(NamedTuple):
    """A batch that a worker is to make."""

    reader: int  # its number
    slot: int  # of the ring, for the batch
    rows: np.ndarray  # (n,) int64: positions in the set
    plan: Any  # of `Reader.augment` for them; None: pictures are only read


class Reader(Protocol):
    """How a worker reads one set of pictures; a dataclass, sent to each worker once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(pictures, height, width, channels), uint8."""

    def open(self) -> Any:
        """What `read` reads from, in the worker's process."""

    def read(self, opened: Any, rows: np.ndarray, plan: Any, out: np.ndarray) -> None:
        """Writes the pictures `rows` (n,) into `out` (n, height, width, channels) uint8, augmented
        by `plan` unless that is None. Raises UserError."""


@dataclass(frozen=True)
class MapReader:
    """Reads decoded pictures from a memory map."""

    file: str
    offset: int  # bytes
    shape: tuple[int, ...]  # (pictures, height, width, channels), uint8
    identity: tuple[int, int]  # of the file, which may be replaced during the run
    augment: Any

    def open(self) -> np.ndarray:
        try:
            with open(self.file, "rb") as file:
                if file_identity(os.fstat(file.fileno())) == self.identity:
                    return np.memmap(file, np.uint8, "r", self.offset, self.shape)
            problem = "the file was changed during the run"
        except OSError as error:
            problem = error.strerror or str(error)
        raise UserError(
            f"cannot read the decoded pictures in {self.file}: {problem}; start again with "
            "--resume, and leave the folder alone meanwhile"
        )

    def read(self, opened: np.ndarray, rows: np.ndarray, plan: Any, out: np.ndarray) -> None:
        if plan is None:
            np.take(opened, rows, axis=0, out=out, mode="clip")
        else:
            out[:] = self.augment.apply(opened, plan, rows)


def file_identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_size


def work(connection, name: str, slots: int, slot_bytes: int) -> None:
    """The main loop of a worker, which answers each request with None, or with the exception that
    training is to raise. Ends when the training process closes the pipe or dies."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    ring = Ring.attach(name, slots, slot_bytes)
    readers: dict[int, Reader] = {}
    opened: dict[int, Any] = {}
    messages: SimpleQueue = SimpleQueue()
    Thread(target=_receive, args=(connection, messages), daemon=True).start()
    try:
        while True:
            message = messages.get()
            if not isinstance(message, Request):
                number, reader = message
                readers[number] = reader
                continue
            number, slot, rows, plan = message
            failure: Exception | None = None
            try:
                reader = readers[number]
                if number not in opened:
                    opened[number] = reader.open()
                out = ring.pictures(slot, len(rows), reader.shape)
                reader.read(opened[number], rows, plan, out)
            except UserError as error:
                failure = UserError(str(error))
            except Exception:
                failure = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            connection.send(failure)
    except OSError:
        _end()


def _receive(connection, messages: SimpleQueue) -> None:
    """Takes messages off the pipe as they come: in a full pipe the training process would have to
    wait for a worker that hangs."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        _end()
    except Exception:
        traceback.print_exc()
        os._exit(1)


def _end() -> None:
    os._exit(0)  # without cleanup: the shared memory belongs to the training process
