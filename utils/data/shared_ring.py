"""Memory that processes share: a ring of slots, one for each batch on its way."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from utils.errors import UserError

# Where Linux keeps shared memory. In a container it is 64 MB unless somebody asked for more.
FOLDER = "/dev/shm"
PAGE = 4096  # bytes; a slot starts at a border of pages


class Ring:
    """`slots` pieces of `slot_bytes` bytes each, in a block of memory with a name.

    Attributes:
        array: (slots, bytes) uint8, shared; None after `close`.
        name: what other processes open it by.
    """

    def __init__(self, memory: SharedMemory, slots: int, slot_bytes: int):
        self._memory, self.name = memory, memory.name
        self.array = np.ndarray((slots, slot_bytes), np.uint8, buffer=memory.buf)

    @classmethod
    def create(cls, slots: int, slot_bytes: int, warn: Callable[[str], None]) -> Ring:
        """A new ring; of fewer slots, said by `warn`, where there is no room for as many.

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
        """The ring that another process has made."""
        return cls(SharedMemory(name), slots, slot_bytes)

    def pictures(self, slot: int, n: int, shape: tuple[int, ...]) -> np.ndarray:
        """The first n pictures in a slot, (n, *shape[1:]) uint8; not a copy."""
        shape = (n, *shape[1:])
        return self.array[slot, : math.prod(shape)].reshape(shape)

    def close(self) -> None:
        """Gives the memory back; by the process that made it, when no other needs it any more."""
        self.array = None
        with contextlib.suppress(BufferError):  # somebody holds a slot: freed when he lets go
            self._memory.close()
        with contextlib.suppress(FileNotFoundError):
            self._memory.unlink()


def free_bytes() -> int | None:
    """Free shared memory; None where the system does not tell."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _reserve(memory: SharedMemory) -> None:
    """Takes the memory now: to find none left at the first write would be a SIGBUS."""
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
        f"reading processes need {2 * slot_bytes / 1e6:,.1f} MB of shared memory for two batches "
        f"and {FOLDER} has {free / 1e6:,.1f} MB free: give it more (docker run --shm-size 1g), "
        "take a smaller --batch_size, or read without processes (--workers 0)"
    )
