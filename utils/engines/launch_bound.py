"""Finds out whether optimizer steps are launch-bound: a CUDA graph then makes them faster.

A GPU that is faster than the host waits for each launch, so that a step takes hardly longer than
its launches. A step is called launch-bound if

    GPU time <= SLACK * host time.

The host time is measured from the first launch of a step to the last, the GPU time by events before
and after the step, which are read once the GPU has passed them; nothing waits. Only steps that
begin with the GPU idle are timed: with about 1,024 launches pending the host must wait before it
can launch more, and its time would be the GPU's. The step after a log line begins with the GPU
idle, as the host waits there, and so does nearly every launch-bound step. The minimum of TIMED
measurements counts, for the host and for the GPU, as any disturbance only makes them longer.
"""

import time
from collections.abc import Callable

import torch
from torch.cuda import Event

TIMED = 3  # steps
SLACK = 1.2  # after the last launch the GPU still has to finish the last kernels


class LaunchBound:
    """Times steps and tells whether they are launch-bound.

    Args:
        mark: returns an event at the end of the work submitted so far, with timing.
        clock: of the host, in seconds.
    """

    def __init__(self, mark: Callable[[], Event], clock: Callable[[], float] = time.perf_counter):
        self.mark, self.clock = mark, clock
        self.host_ms: list[float] = []
        self.device_ms: list[float] = []
        self._last: Event | None = None  # after the last step
        self._begun: tuple[Event, float] | None = None  # start of a step that is being timed
        self._unread: tuple[Event, Event, float] | None = None

    def begin(self, usual: bool) -> None:
        """To be called before a step. `usual`: it is like those to come: not smaller, and not the
        first of its kind, which sets up memory and compiles kernels."""
        self._read()
        idle = self._last is not None and self._last.query()
        self._begun = (self.mark(), self.clock()) if usual and idle else None

    def end(self) -> None:
        """To be called after every step for which `begin` was called."""
        self._last = self.mark()
        if self._begun is not None:
            start, began = self._begun
            self._unread = start, self._last, 1000 * (self.clock() - began)

    def verdict(self) -> bool | None:
        """Whether steps are launch-bound; None: not known yet."""
        self._read()
        if len(self.host_ms) < TIMED:
            return None
        return min(self.device_ms) <= SLACK * min(self.host_ms)

    def _read(self) -> None:
        if self._unread is not None and self._unread[1].query():
            start, end, host = self._unread
            self.host_ms.append(host)
            self.device_ms.append(start.elapsed_time(end))
            self._unread = None

    def __str__(self) -> str:
        return f"launching a step takes {min(self.host_ms):.1f} of its {min(self.device_ms):.1f} ms"


def mark_on(device: torch.device) -> Event:
    """An event, with timing, at the end of the work submitted to a GPU's current stream so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
