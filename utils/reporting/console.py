"""Output for people: lines on the console and in log.txt, and one progress bar."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from ..machine.packages import mendable
from ..place import as_called

# Without a terminal, the shortest interval between progress lines, in seconds.
PLAIN_LINE_SECONDS = 10.0
# Fits into 80 columns, with loss and accuracy as postfix.
BAR = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt}, {remaining} left, {rate_fmt}{postfix}"


class Console:
    """Lines go to stdout and into a log file, the bar to stderr if that is a terminal.

    Args:
        silent: print and log nothing; for all processes of a run but the first.
    """

    def __init__(self, silent: bool = False):
        self.silent = silent
        self._log: TextIO | None = None
        self._early: list[str] = []  # lines for the log before it is open
        self._bar = None  # a tqdm bar
        self._last_plain = -math.inf
        self.live = not silent and _columns(sys.stderr) > 0

    def open_log(self, path: Path) -> None:
        """Raises OSError."""
        # File names may contain surrogates, which UTF-8 cannot encode.
        self._log = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        for line in self._early:
            self.log(line)
        self._early.clear()

    def say(self, line: str) -> None:
        """Prints a line, and adds it to the log with the time."""
        if self.silent:
            return
        self._draw("clear")
        print_line(line, sys.stdout)
        self._draw("refresh")
        self.log(line)

    def log(self, line: str) -> None:
        """Adds a line to the log only."""
        if self.silent:
            return
        if self._log is None:
            self._early.append(line)
            return
        # On a full disk: the console has the line, and the next checkpoint reports the problem.
        with contextlib.suppress(OSError):
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
            self._log.flush()

    def start_bar(self, total: int, done: int, unit: str = " samples") -> None:
        """Starts the bar of the whole run, in samples."""
        if self.live:
            from tqdm import tqdm  # not needed for --help

            self._bar = tqdm(
                total=total, initial=done, unit=unit, unit_scale=unit == " samples",
                dynamic_ncols=True, smoothing=0.05, file=_Terminal(sys.stderr),
                bar_format=BAR, leave=False,
            )  # fmt: skip

    def resize_bar(self, total: int) -> None:
        if self._bar is not None:
            self._bar.total = total

    def advance(self, samples: int) -> None:
        self._draw("update", samples)

    def progress(self, text: str) -> None:
        """Shows the latest figures: beside the bar, or as a line now and then."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        elif time.monotonic() - self._last_plain >= PLAIN_LINE_SECONDS:
            self._last_plain = time.monotonic()
            self.say(text)

    def end_bar(self) -> None:
        self._draw("close")
        self._bar = None

    def _draw(self, action: str, *values) -> None:
        """Calls this method of the bar, if there is one."""
        if self._bar is not None:
            getattr(self._bar, action)(*values)

    def close(self) -> None:
        self.end_bar()
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk: see `log`
                self._log.close()
            self._log = None


class _Terminal:
    """A stream that may be closed at any moment. Training continues; and an error within tqdm would
    leave its lock locked, for which other threads would wait for ever."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def _columns(stream) -> int:
    """Width of the terminal of a stream; 0 if it has none, or one without a size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def duration(seconds: float) -> str:
    """3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def epoch_text(epoch: float) -> str:
    """2.0 -> "2", 0.0769 -> "0.08"."""
    return f"{epoch:.0f}" if epoch % 1 == 0 else f"{epoch:.2f}"


def exit_code(act: Callable[[], None]) -> int:
    """Calls `act`; returns 130 after Ctrl-C, and 2 after a line on what the user has to mend."""
    try:
        act()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (told := mendable(error)) is None:
            raise
        print_line(f"error: {told}", sys.stderr)
        return 2
    return 0


def print_line(line: str, stream) -> None:
    """Prints a line, with escapes for characters that the stream cannot encode (under LC_ALL=C,
    say). Where nobody can read it, after `| head` or `>&-`, the program goes on without.

    Args:
        stream: None, as Python has it, if it was closed before the start.
    """
    encoding = getattr(stream, "encoding", None) or "ascii"
    text = f"{as_called(line)}\n".encode(encoding, "backslashreplace").decode(encoding)
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)  # at once, so that lines of several threads stay whole
            stream.flush()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
