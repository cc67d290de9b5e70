"""How many threads compute on a CPU: as many as other programs leave cores for.

The threads of one operation wait for each other at its end. Where one of two threads has to share
its core with another program, the other one waits for it in every operation, and both together are
slower than one alone (benchmarks/results/busy_machine.md has figures).
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

SECONDS = 2.0  # at least, from one look to the next
# A core counts as taken from this part of its time on: a program that wants all of it gets half
# while one of our threads is there, too. Below the other part it counts as free again.
TAKEN, FREE = 0.4, 0.3


class FreeCores:
    """Sets PyTorch's number of threads: `most`, less one for each core that others keep busy, and
    at least one. Results differ in their last bits with the number of threads.

    Args:
        most: threads on a machine with nothing else to do.
        say: is told of the first time that threads are fewer.
        log: of all other changes.
        cores: that this process may use.
        others: () -> seconds that processes other than this one, its threads and its ended children
            have computed on these cores since the machine's start.
        clock: () -> seconds.
    """

    def __init__(
        self,
        most: int,
        say: Callable[[str], None],
        log: Callable[[str], None],
        cores: int | None = None,
        others: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.most, self.say, self.log = most, say, log
        self.cores = cores or len(os.sched_getaffinity(0))
        self.others, self.clock = others or seconds_of_others, clock
        self.threads = most
        self.seen, self.since = self.others(), clock()

    def look(self) -> None:
        """Takes another number of threads where others have begun or ended; cheap enough to be
        called after every step, for it looks every SECONDS."""
        now = self.clock()
        if now - self.since < SECONDS:
            return
        seen = self.others()
        busy = (seen - self.seen) / (now - self.since)  # cores, as a mean
        self.seen, self.since = seen, now
        fewer = self.cores - math.floor(busy + 1 - TAKEN)
        more = self.cores - math.floor(busy + 1 - FREE)
        threads = max(1, min(self.most, fewer, max(self.threads, more)))
        if threads != self.threads:
            self._take(threads)

    def _take(self, threads: int) -> None:
        if threads < self.threads:
            line = (
                f"other programs use the CPU: {threads} of {self.most} threads compute from here "
                f"on (--threads {self.most} keeps them all)"
            )
            tell, self.say = self.say, self.log
        else:
            line = f"cores are free again: {threads} of {self.most} threads compute from here on"
            tell = self.log
        torch.set_num_threads(threads)
        self.threads = threads
        tell(line)


def seconds_of_others(root: Path = Path("/")) -> float:
    """Processor time on the cores that this process may use, less its own and that of its children
    that have ended. A child that still runs is one of the others: it needs a core like them.

    Args:
        root: of the file system whose /proc is read.
    Raises:
        OSError: the system does not tell (/proc/stat of Linux).
    """
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in (root / "proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in own:
            user, nice, system, _, _, interrupts, soft, *rest = map(int, values)
            ticks += user + nice + system + interrupts + soft + (rest[0] if rest else 0)
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def follow_free_cores(say: Callable, log: Callable) -> FreeCores | None:
    """From PyTorch's present number of threads; None where there is nothing to choose, or where the
    system does not tell what others do."""
    try:
        return FreeCores(torch.get_num_threads(), say, log) if torch.get_num_threads() > 1 else None
    except (OSError, AttributeError, ValueError):  # no Linux
        return None
