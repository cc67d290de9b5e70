"""The files that the processes of a study share, also on several machines: locks, and the journal.

The kernel releases a lock when its holder has ended, and all children that inherited it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from optuna.storages.journal import JournalFileBackend

from utils.errors import UserError
from utils.files import reason, remedy

AGAIN = ", then start the same command again"  # the end of a message


@contextlib.contextmanager
def as_user_error(where: object, written: Path | None = None, end: str = "") -> Iterator[None]:
    """Raises UserError in place of an OSError of the block.

    Args:
        where: the file or flag that the message begins with.
        written: the file or folder that the block writes to: the message says what to do about it.
        end: of the message.
    """
    try:
        yield
    except OSError as error:
        way = "" if written is None else f"; {remedy(error, written)}"
        raise UserError(f"{where}: {reason(error)}{way}{end}") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for the lock, and holds it in the block. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def take_lock(path: Path) -> int | None:
    """Takes the lock without waiting. Returns its file descriptor, which the caller closes to
    release it; None if another process holds it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


class Journal(JournalFileBackend):
    """The records of a study, a JSON object per line.

    Raises UserError where the file cannot be read or written.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._as_user_error():
            super().__init__(str(path), _JournalLock(path))  # type: ignore[arg-type]  # its methods

    def _as_user_error(self) -> contextlib.AbstractContextManager:
        return as_user_error(self.path, self.path, "; the same command then goes on")

    def read_logs(self, log_number_from: int) -> list[dict]:  # type: ignore[override]  # a list
        """The complete lines from `log_number_from` on, without one that is still being written."""
        logs: list[dict] = []
        try:
            with self._as_user_error():
                for log in super().read_logs(log_number_from):
                    logs.append(log)
        except ValueError:
            number = log_number_from + len(logs) + 1
            raise UserError(f"{self.path}: line {number} is damaged: remove it") from None
        return logs

    def append_logs(self, logs: list[dict]) -> None:
        with self._as_user_error():
            super().append_logs(logs)


class _JournalLock:
    """Optuna's own locks are left behind when their holder is killed, and others then wait for half
    a minute; and Optuna reads nothing after an incomplete line, which a kill or a full disk leaves.
    This lock cuts such a line off, before the next one is written and after one that did not fit.
    """

    def __init__(self, path: Path):
        self.path = path

    def acquire(self) -> bool:
        file = open(self.path, "rb+", buffering=0)  # noqa: SIM115  # closed by `release`
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file = file  # only now, as another thread may have held the lock
        try:
            self._cut()
        except OSError:
            file.close()
            raise
        return True

    def release(self) -> None:
        with self._file:
            self._cut()

    def _cut(self) -> None:
        if (end := self._file.seek(0, os.SEEK_END)) == 0:
            return
        self._file.seek(end - 1)
        if self._file.read(1) != b"\n":
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)
