"""Shared memory between processes: a ring of slots, each for one batch."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from utils.errors import UserError

# Where Linux keeps shared memory. Containers limit it to 64 MB by default.
FOLDER = "/dev/shm"
PAGE = 4096  # bytes; slots are aligned to pages


class Ring:
    """`slots` slots of `slot_bytes` bytes each, in a named block of shared memory.

    Attributes:
        array: (slots, bytes) uint8, shared; None after `close`.
        name: by which other processes open it.
    """

    def __init__(self, memory: SharedMemory, slots: int, slot_bytes: int):
        self._memory, self.name = memory, memory.name
        self.array = np.ndarray((slots, slot_bytes), np.uint8, buffer=memory.buf)

    @classmethod
    def create(cls, slots: int, slot_bytes: int, warn: Callable[[str], None]) -> Ring:
        """A new ring; with fewer slots, and a line by `warn`, if there is no room for all.

        Raises:
            UserError: there is no room for two slots.
        """
        slot_bytes = -(-slot_bytes // PAGE) * PAGE
        free = free_bytes()
        if free is not None and free < slots * slot_bytes:
            fit = free // slot_bytes
            if fit < 2:
                raise _too_small(free, slot_bytes)
            warn(
                f"note: {FOLDER} has {free / 1e6:,.0f} MB free, so {fit} batches are read ahead "
                f"and not {slots}: give it {slots * slot_bytes / 1e6:,.0f} MB (docker run "
                "--shm-size) if training waits for data"
            )
            slots = fit
        try:
            memory = SharedMemory(create=True, size=slots * slot_bytes)
        except OSError as error:
            raise _too_small(free_bytes() or 0, slot_bytes) from error
        try:
            _reserve(memory)
        except OSError as error:
            memory.close()
            memory.unlink()
            raise _too_small(free_bytes() or 0, slot_bytes) from error
        return cls(memory, slots, slot_bytes)

    @classmethod
    def attach(cls, name: str, slots: int, slot_bytes: int) -> Ring:
        """Opens the ring of another process."""
        return cls(SharedMemory(name), slots, slot_bytes)

    def pictures(self, slot: int, n: int, shape: tuple[int, ...]) -> np.ndarray:
        """The first n pictures in a slot, (n, *shape[1:]) uint8; a view."""
        shape = (n, *shape[1:])
        return self.array[slot, : math.prod(shape)].reshape(shape)

    def close(self) -> None:
        """Frees the memory. For the process that created it, when no other uses it any more."""
        self.array = None
        with contextlib.suppress(BufferError):  # a view is still in use: freed with it
            self._memory.close()
        with contextlib.suppress(FileNotFoundError):
            self._memory.unlink()


def free_bytes() -> int | None:
    """Free shared memory; None if it is not known."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _reserve(memory: SharedMemory) -> None:
    """Allocates the memory now: running out of it at the first write would be a SIGBUS."""
    path = os.path.join(FOLDER, memory.name)
    if not hasattr(os, "posix_fallocate") or not os.path.exists(path):
        return
    handle = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(handle, 0, memory.size)
    finally:
        os.close(handle)


def _too_small(free: int, slot_bytes: int) -> UserError:
    return UserError(
        f"worker processes need {2 * slot_bytes / 1e6:,.1f} MB of shared memory for two batches "
        f"and {FOLDER} has {free / 1e6:,.1f} MB free: give it more (docker run --shm-size 1g), "
        "take a smaller --batch_size, or read without processes (--workers 0)"
    )
