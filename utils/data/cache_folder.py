"""Folders that exist completely or not at all, even if processes die or build them at once.

A cache is built in a temporary folder beside its place, flushed to disk and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..errors import UserError
from ..files import reason, sync_folder

_TEMPORARY, LOCK = ".building-", "lock"
T = TypeVar("T")


@contextlib.contextmanager
def built_folder(folder: Path, is_whole: Callable[[], bool]) -> Iterator[Path]:
    """A temporary folder for what is to be in `folder`, where it is put at the end; see
    `put_in_place`. Raises OSError."""
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    with temporary_folder(parent) as temporary:
        yield temporary
        sync_folder(temporary)
        put_in_place(temporary, folder, is_whole)
        sync_folder(parent)
        (folder / LOCK).unlink(missing_ok=True)


def built(
    folder: Path, opened: Callable[[], T | None], fill: Callable[[Path], None], what: str
) -> T:
    """Builds `folder` by `fill` and returns what `opened` then finds in it.

    Args:
        opened: reads the folder; None: it is not there, or damaged.
        fill: called with the path of a temporary folder, which becomes `folder`.
        what: the thing written, for messages.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with built_folder(folder, lambda: opened() is not None) as temporary:
            fill(temporary)
    except OSError as error:
        raise UserError(
            f"cannot write {what} in {folder.parent}: {reason(error)}; choose another folder with "
            "--cache_dir"
        ) from error
    found = opened()
    assert found is not None, f"{folder} cannot be read back"
    return found


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder; the kernel lock on a file in it says that its owner is alive."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        try:
            folder.chmod(0o755)  # mkdtemp's 0700 would keep a shared cache from others
            with open(folder / LOCK, "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (folder / LOCK).exists():
                    continue  # before it was locked, another process removed it as abandoned
                yield folder
                return
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # gone already if it was put in place


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders of killed processes: those whose lock nobody holds."""
    for folder in parent.glob(_TEMPORARY + "*"):
        with contextlib.suppress(OSError), open(folder / LOCK, "r+b") as lock:
            # NFS grants an exclusive lock only on a file that is open for writing.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(temporary: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Rename `temporary` to `folder`. An intact cache that another process has put there is kept, a
    damaged one replaced.

    `is_whole` tells whether the cache at `folder` is intact. Raises OSError.
    """
    for _ in range(3):
        try:
            os.rename(temporary, folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if is_whole():
            return
        # Moved away before it is removed, so that nobody sees half of it.
        damaged = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, damaged / "damaged")
        shutil.rmtree(damaged, ignore_errors=True)
    raise OSError(errno.EBUSY, f"other processes keep changing {folder.name}")


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises UserError if there is no room in the folder for `needed` bytes of `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{what} needs {needed / 1e6:,.0f} MB and {folder} has {free / 1e6:,.0f} MB free: free "
            "some space, or choose another folder with --cache_dir"
        )


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a new file and flushes it to disk. Raises OSError, with its number: that of np.save
    has none."""
    with open(path, "wb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(array))
        file.flush()
        os.fsync(file.fileno())
