"""metrics.jsonl: one JSON object per line, and never a partial line."""

import json
import math
import os
from pathlib import Path

from ..files import reason


def to_json(value, **options) -> str:
    """JSON, with null for numbers that are not finite, which JSON lacks."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """Appends records to a file. A full disk delays lines, but none is lost.

    Args:
        path: the file; created if missing.
        warn: called with a line, once, when a record cannot be written for now.
        trackers: receive every record, too (see trackers.py).
    """

    def __init__(self, path: Path, warn=print, trackers=()):
        self.trackers = [*trackers]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = os.lseek(self._file, 0, os.SEEK_END)
        self._waiting = b""
        self._path, self._warn = path, warn

    def write(self, **record) -> None:
        """Writes one record as a line."""
        for tracker in self.trackers:
            tracker.log(record)
        warned = bool(self._waiting)
        self._waiting += (to_json(record) + "\n").encode()
        try:
            self._append()
        except OSError as error:
            if not warned:
                self._warn(
                    f"{self._path}: {reason(error)}; the lines are kept in memory until there is "
                    "room again"
                )

    def _append(self) -> None:
        position = self._end
        content = self._waiting
        try:
            while content:
                written = os.pwrite(self._file, content, position)
                content, position = content[written:], position + written
        except OSError:
            os.ftruncate(self._file, self._end)  # removes a partial line
            raise
        self._end, self._waiting = position, b""

    def position(self) -> int:
        """Size of the file in bytes, for `cut` on resume. Raises OSError if the disk is full."""
        if self._waiting:
            self._append()
        return self._end

    def sync(self) -> None:
        """Waits until the lines are on disk. Raises OSError."""
        os.fsync(self._file)

    def cut(self, position: int, step: int = 0) -> None:
        """Removes what was written after `position`, which the checkpoint of `step` has stored.
        Trackers drop their records from that step on, so they receive the remaining ones of that
        step again.
        """
        self._end = min(position, self._end)
        os.ftruncate(self._file, self._end)
        kept = self.read() if self.trackers and self._end else []
        for record in kept:
            if record["step"] >= step:
                for tracker in self.trackers:
                    tracker.log(record)

    def read(self) -> list[dict]:
        return read_metrics(self._path)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        os.close(self._file)


class NoMetrics:
    """Replaces a MetricsLog in all processes of a run but the first."""

    trackers = ()

    def write(self, **record) -> None:
        pass

    def position(self) -> int:
        return 0

    def sync(self) -> None:
        pass

    def read(self) -> list[dict]:
        return []


def read_metrics(path: Path) -> list[dict]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
