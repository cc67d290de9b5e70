"""A time limit for a benchmark: parts that fail or take too long are skipped, the others run."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Iterator

from benchmarks.common import silent


class Budget:
    """A time limit that starts now."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


class OutOfTime(BaseException):  # torch.compile would turn an Exception into another one
    pass


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread if the block takes longer than `seconds`."""

    def stop(signum, frame):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would be no limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def attempt(name: str, seconds: float, left_out: dict[str, str]) -> Iterator[None]:
    """Runs the block without output. If it fails or takes longer than `seconds`, the reason goes to
    `left_out[name]`, and the program goes on."""
    try:
        with silent(), at_most(seconds):
            yield
        return
    except OutOfTime:
        left_out[name] = f"not done after {seconds:.0f} s" if seconds > 0 else "no time was left"
    except Exception as error:  # a missing compiler, no memory, an error of the GPU
        left_out[name] = in_a_line(error)
    gc.collect()  # a contender has reference cycles, and holds GPU memory
    print(f"  {name}: left out, {left_out[name]}", flush=True)


class ChildError(Exception):
    """An error in another process, on one line."""


def in_a_line(error: BaseException) -> str:
    """The type and the first line of the message, for a table cell."""
    if isinstance(error, ChildError):
        return str(error)
    text = str(error).strip()
    first = text.splitlines()[0][:200].replace("|", "/") if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
