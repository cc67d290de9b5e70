"""Names the process that keeps the others waiting.

When one rank does not join a collective, the others wait until a timeout whose error names nobody.
So a thread of each rank writes to the launcher's store, twice a second, that it is alive, which
step its rank has finished, what it does now, and for how long. When its own rank makes no progress
for too long, it looks up which ranks are silent, or do something else than the others.

The first step may take long, as when a compiler runs, and until it is finished a rank that is
merely slow is not ended: only if a rank is silent for half a minute, or all have done what they do,
and not all the same, for the whole timeout.
"""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch.distributed as dist

from .environment import launched

BEAT_SECONDS = 0.5
# A rank that has written nothing for this long counts as silent; in the first step a compiler may
# keep its thread from running for a while.
SILENT_SECONDS, SILENT_SECONDS_AT_FIRST = 5.0, 30.0


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Args:
        writes: how often it has written to the store.
        step: the optimizer steps it has finished.
        phase: what it does, as in "loading".
        seconds: for which it has been doing so.
    """

    writes: int
    step: int
    phase: str
    seconds: float


class Watch:
    """Ends this process, after an error line, if it makes no progress for `timeout` seconds; from
    the first `enter` on.

    Args:
        rank, size: of this process.
        timeout: seconds without a `beat`, or in the first step without an `enter`, after which the
            process is ended.
        step: () -> optimizer steps finished.
        store: where ranks write; None: a new connection to torchrun's store.
        end: called with an exit code to end the process.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        step: Callable[[], int],
        store: dist.Store | None = None,
        end: Callable[[int], None] = os._exit,
    ):
        self.rank, self.size, self.timeout, self.step, self.end = rank, size, timeout, step, end
        # A connection of its own: the main thread may be blocked in the other one.
        self._store = store or dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=30),
        )
        place = launched()
        self._name = f"watch/{place.start if place else 'start'}"
        self._last: float | None = None  # when this rank last made progress
        self._start_step: int | None = None  # the step from which it trains
        self._writes, self._phase, self._entered = 0, "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Called after every step and every batch of an evaluation: this rank makes progress."""
        self._last = time.monotonic()

    def enter(self, phase: str) -> None:
        """What this rank does from now on, as in "loading"."""
        self._phase, self._entered = phase, time.monotonic()
        if self._start_step is None:
            self._start_step = self.step()
        if self._in_first_step():
            self._last = self._entered

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._write()
            last = self._last
            if last is not None and time.monotonic() - last > self.timeout and self._reports():
                self.end(1)
                return

    def silent(self) -> list[int]:
        """The ranks that write nothing for SILENT_SECONDS (or ..._AT_FIRST); waits so long."""
        before = self._places()
        seconds = SILENT_SECONDS_AT_FIRST if self._in_first_step() else SILENT_SECONDS
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._write()
            time.sleep(BEAT_SECONDS)
        now = self._places()
        others = set(range(self.size)) - {self.rank}
        return sorted(rank for rank in others if now.get(rank) == before.get(rank))

    def _reports(self) -> bool:
        """Prints which ranks are silent, or what each one does, and returns True; False if the
        first step merely takes long."""
        silent, places = self.silent(), self._places()
        if self._in_first_step() and not (silent or self._is_stuck(places)):
            return False
        if self._is_first():
            print(f"error: {report(self.timeout, self.size, silent, places)}", file=sys.stderr)
            sys.stderr.flush()
        else:
            time.sleep(BEAT_SECONDS)  # lets that rank print before the launcher ends all of them
        return True

    def _in_first_step(self) -> bool:
        return self.step() == self._start_step

    def _is_stuck(self, places: dict[int, Place]) -> bool:
        """Whether the ranks do different things, and none has made progress for the timeout."""
        phases = {(place.step, place.phase) for place in places.values()}
        return len(phases) > 1 and all(p.seconds > self.timeout for p in places.values())

    def _is_first(self) -> bool:
        """Whether no other rank has reported yet."""
        try:
            return self._store.add(f"{self._name}/reports", 1) == 1
        except (dist.DistError, RuntimeError):  # the launcher is shutting down
            return True

    def _own_place(self) -> Place:
        return Place(self._writes, self.step(), self._phase, time.monotonic() - self._entered)

    def _write(self) -> None:
        self._writes += 1
        with contextlib.suppress(dist.DistError, RuntimeError):  # the launcher is shutting down
            place = json.dumps(astuple(self._own_place()))
            self._store.set(f"{self._name}/{self.rank}", place)

    def _places(self) -> dict[int, Place]:
        """{rank: its place, as last written}."""
        places = {self.rank: self._own_place()}
        with contextlib.suppress(dist.DistError, RuntimeError):
            for rank in set(range(self.size)) - {self.rank}:
                key = f"{self._name}/{rank}"
                if self._store.check([key]):
                    places[rank] = Place(*json.loads(self._store.get(key)))
        return places


def report(timeout: float, size: int, silent: list[int], places: dict[int, Place]) -> str:
    """One line about a run that makes no progress.

    Args:
        silent: ranks that do not answer.
        places: {rank: its place}, where known.
    """
    line = f"no step for {timeout:g} s (--dist_timeout): "
    if silent:
        steps = {rank: place.step for rank, place in places.items()}
        names = [f"rank {rank} ({_last_step(steps.get(rank, 0))})" for rank in silent]
        line += f"no response from {', '.join(names)} of {size} processes"
    else:
        line += f"all {size} processes respond: {_where(places)}"
    return f"{line}; see docs/distributed.md, 'When it hangs'"


def _last_step(step: int) -> str:
    return f"last step {step}" if step else "before its first step"


def _when(step: int) -> str:
    return f"after step {step}" if step else "before the first step"


def _where(places: dict[int, Place]) -> str:
    """What the ranks do, the fewest first: they are likely to keep the others waiting."""
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault((place.step, place.phase), []).append(rank)
    if len(groups) == 1:
        ((step, phase),) = groups
        return f"all are {phase} {_when(step)}, and none is behind"
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[0]))
    texts = []
    for (step, phase), ranks in ordered:
        who = f"ranks {', '.join(map(str, ranks))} are" if ranks[1:] else f"rank {ranks[0]} is"
        texts.append(f"{who} {phase} {_when(step)}")
    (step, phase), most = ordered[-1]
    if most[1:]:
        texts[-1] = f"the others are {phase} {_when(step)}"
    return "; ".join(texts)
