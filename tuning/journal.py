"""The journal of a study: Optuna's records, a JSON object per line, in a file that processes share.

Optuna's own file backend leaves a lock behind when its holder is killed, for which others wait half
a minute, and reads nothing after an incomplete line. Here the kernel releases the lock when its
holder dies, and an incomplete line, left by a kill or a full disk, is cut off before the next one
is written.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from optuna.storages.journal import BaseJournalBackend

from utils.errors import UserError
from utils.files import reason


class Journal(BaseJournalBackend):
    """Args:
    path: the file; created if missing.

    Every method raises UserError if the file cannot be read or written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._starts = [0]  # byte at which each line that was read begins, and the next one

    def read_logs(self, log_number_from: int) -> list[dict]:
        """The complete lines from `log_number_from` on, without one that is still being written."""
        start = min(log_number_from, len(self._starts) - 1)
        del self._starts[start + 1 :]
        try:
            with open(self.path, "ab+") as file:
                file.seek(self._starts[start])
                content = file.read()
        except OSError as error:
            raise self._failure(error) from None
        logs = []
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                logs.append(json.loads(line))
            except ValueError:
                number = len(self._starts)
                raise UserError(f"{self.path}: line {number} is damaged: remove it") from None
            self._starts.append(self._starts[-1] + len(line))
        return logs[log_number_from - start :]

    def append_logs(self, logs: list[dict]) -> None:
        """Writes all of the lines, to disk, or none of them."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            # Unbuffered, so that what did not fit on a full disk is not written later.
            with open(self.path, "ab+", buffering=0) as file, _locked(file):
                end = _whole_lines(file)
                os.ftruncate(file.fileno(), end)
                try:
                    while lines:
                        lines = lines[file.write(lines) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), end)
                    raise
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: {reason(error)}; make room or repair it; the same command then goes on"
        )


@contextlib.contextmanager
def _locked(file) -> Iterator[None]:
    """Closing the file releases the lock."""
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _whole_lines(file) -> int:
    """Bytes up to the end of the last complete line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
