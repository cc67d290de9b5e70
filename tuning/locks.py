"""File locks for the processes that share a study, also on several machines. The kernel releases a
lock when its holder has ended, and all children that inherited it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Waits for the lock, and holds it in the block. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def take(path: Path) -> int | None:
    """Takes the lock without waiting. Returns its file descriptor, which the caller closes to
    release it; None if another process holds it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
