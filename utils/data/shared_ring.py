"""Shared memory between processes: a ring of slots, each for one batch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from ..errors import UserError
from ..files import reason

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
    def create(
        cls, slots: int, slot_bytes: int, warn: Callable[[str], None], ranks: int = 1
    ) -> Ring:
        """A new ring; with fewer slots, and a line by `warn`, if there is no room for all.

        Args:
            ranks: processes of this machine, each of which makes such a ring.

        Raises:
            UserError: there is no room for two slots.
        """
        slot_bytes = -(-slot_bytes // PAGE) * PAGE
        wanted, free = slots, free_bytes()
        slots = _fitting(wanted, slot_bytes, free, ranks)
        while (memory := _reserved(slots * slot_bytes)) is None:
            # Another process has taken the room meanwhile. Always fewer, so that this ends.
            free = free_bytes()
            slots = min(slots - 1, _fitting(wanted, slot_bytes, free, ranks))
            if slots < 2:
                raise _too_small(free or 0, slot_bytes)
        if slots < wanted:
            warn(
                f"note: {FOLDER} has {(free or 0) / 1e6:,.0f} MB free, so {slots} batches are read "
                f"ahead and not {wanted}: give it {ranks * wanted * slot_bytes / 1e6:,.0f} MB "
                "(docker run --shm-size) if training waits for data"
            )
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
    with contextlib.suppress(OSError):
        return shutil.disk_usage(FOLDER).free
    return None


def total_bytes() -> int | None:
    """Shared memory, free or not; None if it is not known."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(FOLDER).total
    return None


def _fitting(wanted: int, slot_bytes: int, free: int | None, ranks: int) -> int:
    """How many slots, `wanted` at most, this process may take so that all ranks get two or more.

    Raises:
        UserError: there is no room for two.
    """
    if free is None:
        return wanted
    if free // slot_bytes < 2:
        raise _too_small(free, slot_bytes)
    total = total_bytes()
    scarce = total is not None and total < ranks * wanted * slot_bytes
    if free >= wanted * slot_bytes and not scarce:
        return wanted
    return min(wanted, max(2, free // ranks // slot_bytes))


def _reserved(size: int) -> SharedMemory | None:
    """New shared memory of `size` bytes; None if there is too little room.

    Raises:
        UserError: there can be none, whatever its size.
    """
    memory = None
    try:
        memory = SharedMemory(create=True, size=size)
        _reserve(memory)
    except OSError as error:
        if memory is not None:
            memory.close()
            memory.unlink()
        if error.errno == errno.ENOSPC:
            return None
        raise UserError(
            f"cannot make shared memory in {FOLDER} ({reason(error)}): read without worker "
            "processes (--workers 0)"
        ) from error
    return memory


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
