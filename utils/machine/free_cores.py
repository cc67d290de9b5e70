"""Adapts PyTorch's number of CPU threads to the cores that other programs leave free.

The threads of an operation wait for each other at its end. If one of two threads shares its core
with another program, the other thread waits in every operation, and the two are slower than one
alone (figures in benchmarks/results/busy_machine.md).
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .cores import allowed_cores

SECONDS = 2.0  # minimum time between two measurements
# A core counts as busy if others use at least BUSY of its time: a program that would use a whole
# core gets half of it if one of our threads is on it. It counts as free again below FREE.
BUSY, FREE = 0.4, 0.3


class FreeCores:
    """Sets PyTorch's number of threads: `max_threads`, or the number of cores that others leave
    free if that is smaller, but at least one. The number of threads changes results in their last
    bits.

    Args:
        max_threads: number of threads on an otherwise idle machine.
        say: called with a message the first time the number is lowered.
        log: called with a message for all other changes.
        cores: number of cores on which this process may run, and of which `others_seconds` tells;
            None: as the system says.
        others_seconds: () -> CPU seconds of all other processes on these cores since boot; None:
            `cpu_seconds_of_others`.
        clock: () -> seconds.
    """

    def __init__(
        self,
        max_threads: int,
        say: Callable[[str], None],
        log: Callable[[str], None],
        cores: int | None = None,
        others_seconds: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_threads, self.say, self.log = max_threads, say, log
        self.cores = cores or allowed_cores()
        self.others_seconds, self.clock = others_seconds or cpu_seconds_of_others, clock
        self.threads = max_threads
        self.last_seconds, self.last_time = self.others_seconds(), clock()

    def look(self) -> None:
        """Adapts the number of threads. Measures at most every SECONDS, so it is cheap enough to
        call after every step."""
        now = self.clock()
        if now - self.last_time < SECONDS:
            return
        seconds = self.others_seconds()
        busy = (seconds - self.last_seconds) / (now - self.last_time)  # cores in use, on average
        self.last_seconds, self.last_time = seconds, now
        not_busy = self.cores - math.floor(busy + 1 - BUSY)
        free = self.cores - math.floor(busy + 1 - FREE)
        threads = max(1, min(self.max_threads, not_busy, max(self.threads, free)))
        if threads != self.threads:
            self._set_threads(threads)

    def _set_threads(self, threads: int) -> None:
        if threads < self.threads:
            line = (
                f"other programs use the CPU: computing with {threads} of {self.max_threads} "
                f"threads from here on (--threads {self.max_threads} keeps all)"
            )
            report, self.say = self.say, self.log
        else:
            line = (
                f"cores are free again: computing with {threads} of {self.max_threads} threads "
                "from here on"
            )
            report = self.log
        torch.set_num_threads(threads)
        self.threads = threads
        report(line)


def cpu_seconds_of_others(root: Path = Path("/")) -> float:
    """CPU seconds since boot on the cores that this process may use, less those of this process and
    of its children that have ended. Running children count as others, since they need cores, too.

    Args:
        root: of the file system whose /proc is read.
    Raises:
        OSError: there is no /proc/stat (Linux only).
    """
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in (root / "proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in usable:
            user, nice, system, _, _, interrupts, soft, *rest = map(int, values)
            ticks += user + nice + system + interrupts + soft + (rest[0] if rest else 0)
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def follow_free_cores(say: Callable, log: Callable) -> FreeCores | None:
    """A FreeCores with PyTorch's current number of threads as maximum; None if that is 1, or if
    the system does not report the CPU time of other processes."""
    try:
        return FreeCores(torch.get_num_threads(), say, log) if torch.get_num_threads() > 1 else None
    except (OSError, AttributeError, ValueError):  # not Linux
        return None
