"""Names the process that keeps the others waiting.

When one rank does not join a collective, the others wait until a timeout whose error names nobody.
So a thread of each rank writes to the launcher's store, twice a second, that it is alive, which
step its rank has finished, and what it does now. When its own rank makes no progress for too long,
it looks up which ranks are silent, or do something else than the others.
"""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from utils.launch.environment import launched

BEAT_SECONDS = 0.5
SILENT_SECONDS = 5.0  # a rank that has written nothing for this long counts as silent


class Watch:
    """Ends this process, after an error line, if it makes no progress for `timeout` seconds; from
    the first `beat` on.

    Args:
        rank, size: of this process.
        timeout: seconds without a `beat` after which the process is ended.
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
        self._last: float | None = None
        self._count, self._phase = 0, "starting"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Called after every step and every batch of an evaluation: this rank makes progress."""
        self._last = time.monotonic()

    def enter(self, phase: str) -> None:
        """What this rank does from now on, as in "loading"."""
        self._phase = phase

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._write()
            last = self._last
            if last is not None and time.monotonic() - last > self.timeout:
                self._report()
                self.end(1)
                return

    def silent(self) -> list[int]:
        """The ranks that write nothing for SILENT_SECONDS; waits so long."""
        before = self._beats()
        until = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < until:
            self._write()
            time.sleep(BEAT_SECONDS)
        now = self._beats()
        return [r for r in range(self.size) if r != self.rank and now.get(r) == before.get(r)]

    def _report(self) -> None:
        """Prints which ranks are silent, or what each one does, on the lowest rank that is not
        silent."""
        silent = self.silent()
        places = {rank: (step, phase) for rank, (_, step, phase) in self._beats().items()}
        if self.rank != min(set(range(self.size)) - set(silent)):
            time.sleep(BEAT_SECONDS)  # lets that rank print before the launcher ends all of them
            return
        print(f"error: {report(self.timeout, self.size, silent, places)}", file=sys.stderr)
        sys.stderr.flush()

    def _write(self) -> None:
        self._count += 1
        with contextlib.suppress(dist.DistError, RuntimeError):  # the launcher is shutting down
            beat = [self._count, self.step(), self._phase]
            self._store.set(f"{self._name}/{self.rank}", json.dumps(beat))

    def _beats(self) -> dict[int, tuple[int, int, str]]:
        """{rank: (how often it has written, its step, what it does)}, as last written."""
        beats = {self.rank: (0, self.step(), self._phase)}
        with contextlib.suppress(dist.DistError, RuntimeError):
            for rank in set(range(self.size)) - {self.rank}:
                key = f"{self._name}/{rank}"
                if self._store.check([key]):
                    beats[rank] = tuple(json.loads(self._store.get(key)))
        return beats


def report(timeout: float, size: int, silent: list[int], places: dict[int, tuple[int, str]]) -> str:
    """One line about a run that makes no progress.

    Args:
        silent: ranks that do not answer.
        places: {rank: (its last step, what it does)}, where known.
    """
    line = f"no step for {timeout:g} s (--dist_timeout): "
    if silent:
        known = {rank: f"rank {rank} (last step {step})" for rank, (step, _) in places.items()}
        names = [known.get(rank, f"rank {rank} (before its first step)") for rank in silent]
        line += f"no response from {', '.join(names)} of {size} processes"
    else:
        line += f"all {size} processes respond: {_where(places)}"
    return f"{line}; see docs/distributed.md, 'When it hangs'"


def _where(places: dict[int, tuple[int, str]]) -> str:
    """What the ranks do, the fewest first: they are likely to keep the others waiting."""
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault(place, []).append(rank)
    if len(groups) == 1:
        ((step, phase),) = groups
        return f"all are {phase} after step {step}, and none is behind"
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[0]))
    texts = []
    for (step, phase), ranks in ordered:
        who = f"ranks {', '.join(map(str, ranks))} are" if ranks[1:] else f"rank {ranks[0]} is"
        texts.append(f"{who} {phase} after step {step}")
    (step, phase), most = ordered[-1]
    if most[1:]:
        texts[-1] = f"the others are {phase} after step {step}"
    return "; ".join(texts)
