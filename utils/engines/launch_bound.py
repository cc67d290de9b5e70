"""Whether an optimizer step is bound by its launches: then a CUDA graph makes it faster, and where
there can be none, a larger batch takes hardly longer.

A GPU that is faster than the host waits for each launch, so that a step takes it hardly longer than
the launches take the host. A step is called launch-bound where

    GPU time <= SLACK * host time.

The host time is from the first launch of a step to the last, the GPU time from an event before the
step to one after it. Neither is waited for: events are read once the GPU has passed them. Only
steps that begin with the GPU idle are timed, since with some 1,024 launches pending the host has to
wait before it can launch more, and its time would be the GPU's. The step after a log line begins
so, as the host waits there, and nearly every one that is launch-bound. Of TIMED measurements the
shortest counts, of either side: whatever disturbs one makes it longer.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from utils.engines.engine import EngineTrainer

TIMED = 3  # steps
SLACK = 1.2  # the GPU still has to finish the last kernels when the last launch is done


class Mark(Protocol):
    """A place in the device's work: a `torch.cuda.Event` with timing."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def elapsed_time(self, end) -> float:
        """Milliseconds from here to a later mark; the device has come to both."""


class LaunchBound:
    """Times steps and tells whether they are launch-bound.

    Args:
        mark: marks where the device's work ends at present.
        clock: of the host, in seconds.
    """

    def __init__(self, mark: Callable[[], Mark], clock: Callable[[], float] = time.perf_counter):
        self.mark, self.clock = mark, clock
        self.host_ms: list[float] = []
        self.device_ms: list[float] = []
        self._last: Mark | None = None  # behind the last step
        self._begun: tuple[Mark, float] | None = None  # of a step that is timed
        self._unread: tuple[Mark, Mark, float] | None = None

    def begin(self, usual: bool) -> None:
        """Before a step. `usual`: it is like those to come, not smaller, and not the first one of
        its kind, in which memory is set up and kernels are compiled."""
        self._read()
        idle = self._last is not None and self._last.query()
        self._begun = (self.mark(), self.clock()) if usual and idle else None

    def end(self) -> None:
        """Behind every step that `begin` was called for."""
        self._last = self.mark()
        if self._begun is not None:
            start, began = self._begun
            self._unread = start, self._last, 1000 * (self.clock() - began)

    def verdict(self) -> bool | None:
        """None: not known yet."""
        self._read()
        if len(self.host_ms) < TIMED:
            return None
        return min(self.device_ms) <= SLACK * min(self.host_ms)

    @property
    def all_bound(self) -> bool:
        """Every step that was timed."""
        pairs = zip(self.device_ms, self.host_ms, strict=True)
        return all(device <= SLACK * host for device, host in pairs)

    def _read(self) -> None:
        if self._unread is not None and self._unread[1].query():
            start, end, host = self._unread
            self.host_ms.append(host)
            self.device_ms.append(start.elapsed_time(end))
            self._unread = None

    def __str__(self) -> str:
        return f"launching a step takes {min(self.host_ms):.1f} of its {min(self.device_ms):.1f} ms"


def mark_on(device: torch.device) -> Mark:
    """Where the work of a GPU's current stream ends at present."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class TimedSteps:
    """A Stepper: takes a Trainer's ordinary steps in its place until some have been timed. If all
    of these were launch-bound, a line then says what helps. (All, because steps of texts differ in
    size.)

    Args:
        trainer: its `advice` has what helps under "launches".
        launches: that times the steps.
    """

    settling = False

    def __init__(self, trainer: EngineTrainer, launches: LaunchBound):
        self.trainer, self.launches = trainer, launches
        self._steps, self._begun = 0, False

    def forward_backward(self, batch) -> None:
        if not self._begun:
            loader, self._begun = self.trainer.loader, True
            short = 2 * batch.step_samples < min(loader.step_size, loader.samples)
            self.launches.begin(usual=self._steps > 0 and not short)
        self.trainer.forward_backward(batch)

    def update(self) -> None:
        self.trainer.update()
        self.launches.end()
        self._steps, self._begun = self._steps + 1, False
        if self.launches.verdict() is None:
            return
        self.trainer.delegate_steps(self.trainer)
        if self.launches.all_bound and "launches" in self.trainer.advice:
            advice = self.trainer.advice.pop("launches")
            self.trainer.console.say(f"{self.launches}: {advice}")

    def free_memory(self) -> str:
        return ""
