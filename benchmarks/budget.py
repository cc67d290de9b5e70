"""Time for a benchmark; what does not fit, or fails, is left out and the rest goes on."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Iterator

from benchmarks.common import silent


class Budget:
    """Of time, from now on."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


class OutOfTime(BaseException):  # torch.compile would hand an Exception on as another one
    pass


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in what is done within, in the main thread, after so many seconds."""

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
    """What is done within says nothing. Where it fails, or takes longer, `left_out` gets the reason
    under `name`, and the program goes on."""
    try:
        with silent(), at_most(seconds):
            yield
        return
    except OutOfTime:
        left_out[name] = f"not done after {seconds:.0f} s" if seconds > 0 else "no time was left"
    except Exception as error:  # a compiler that is not there, no memory, a GPU that has given up
        left_out[name] = in_a_line(error)
    gc.collect()  # a contender is a circle of objects, and holds memory of the GPU
    print(f"  {name}: left out, {left_out[name]}", flush=True)


class ChildError(Exception):
    """What went wrong in another process, in a line."""


def in_a_line(error: BaseException) -> str:
    """Its type and the first line of its text, for a cell of a table."""
    if isinstance(error, ChildError):
        return str(error)
    text = str(error).strip()
    first = text.splitlines()[0][:200].replace("|", "/") if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
