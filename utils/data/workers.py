"""Worker processes that read a memory map, or decode, and augment: for data sets that do not fit
in memory.

Their pictures may have to be read from the disk, for which the training step must not wait. The
training process draws which samples a batch has and how each is augmented, as it does without
workers (see loader.py); a worker carries that out and puts the batch into shared memory. So batches
are the same to the bit with any number of workers, even if workers die or hang.

A DataLoader of PyTorch would not do: its workers import PyTorch and belong to one loader, and the
death of one ends the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from ..errors import UserError
from ..machine.spawn import SpawnContext
from .shared_ring import Ring
from .worker_process import (
    SIGNALS,
    MapReader,
    Reader,
    Request,
    file_identity,
    is_map,
    work,
)

AHEAD = 2  # batches in preparation per worker
DEATHS = 3  # per worker, without a finished batch in between, after which the run gives up
# Seconds that training waits for a worker before it is replaced: a disk may be slow, and a worker
# that starts imports its libraries.
PATIENCE = 120
HANGS = 3  # over the same batch, after which the run gives up
LOOK = 1.0  # seconds between two looks at the workers while training waits


@dataclass(eq=False)
class Job:
    """A batch in preparation."""

    reader: Reader
    rows: np.ndarray
    plan: Any
    slot: int | None = None  # for the batch; None until the job is sent to a worker
    done: bool = False  # the worker has answered
    stale: bool = False  # nobody needs the batch any more
    failure: Exception | None = None
    hangs: int = 0  # how many workers have hung over it


@dataclass(eq=False)
class Worker:
    """A process, our end of the pipe to it, and the jobs sent to it, the oldest first."""

    process: Any
    connection: Any
    jobs: deque[Job] = field(default_factory=deque)
    knows: set[int] = field(default_factory=set)  # numbers of readers
    waited: float = 0.0  # seconds by training since it last answered or had no job

    @classmethod
    def start(cls, ring: Ring) -> Worker:
        """Raises UserError if no process can be started."""
        context = SpawnContext()
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(theirs, ring.name, *ring.array.shape), daemon=True
        )
        # The child inherits the blocked signals, and ignores them once it runs.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        except OSError as error:
            ours.close()
            raise UserError(
                f"cannot start a worker process: {error.strerror or error}; use fewer --workers"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        return cls(process, ours)

    def reap(self) -> str:
        """Waits for the end of a process that dies, or has nothing more to do; returns why it
        ended."""
        self.connection.close()
        self.process.join(1)
        if self.process.is_alive():  # although its pipe is closed
            self.kill()
        code = self.process.exitcode
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"

    def kill(self) -> None:
        """Kills the process, which writes nothing more, although it may end later: when a disk
        that it waits for answers."""
        self.connection.close()
        self.process.kill()
        self.process.join(1)


def end_all(members: list[Worker], ring: Ring) -> None:
    """Ends the workers and frees the ring."""
    for worker in members:  # they have nothing to save
        worker.process.kill()
    for worker in members:
        worker.reap()
    members.clear()
    ring.close()


class WorkerPool:
    """The workers of all loaders of a task, started when the first batch is needed.

    Iterators that take turns divide the slots for batches among them. Where there is no free slot,
    batches read ahead for other iterators are dropped, and read again when these continue.

    Args:
        workers: number of processes.
        slot_bytes: size of the largest batch.
        warn: called with a line about a problem that was solved.
        patience: seconds that training waits for a worker before it is replaced.
        ranks: processes of this machine that have such a pool, and share its memory.
    """

    def __init__(
        self,
        workers: int,
        slot_bytes: int,
        warn: Callable[[str], None],
        patience: float = PATIENCE,
        ranks: int = 1,
    ):
        assert workers > 0
        self.workers, self.slot_bytes, self._warn = workers, slot_bytes, warn
        self._patience, self._ranks = patience, ranks
        self._ring: Ring | None = None
        self._free: list[int] = []  # slots
        self._members: list[Worker] = []
        self._ahead: list[deque[Job]] = []  # of each iterator that is in use
        self._readers: list[Reader] = []  # workers know them by their places here
        self._deaths = 0  # since the last finished batch
        self._end: Finalize | None = None
        self._closed = False

    def resize(self, slot_bytes: int) -> None:
        """For batches of another size, before the first one is read."""
        self.slot_bytes = slot_bytes

    def reader(self, images: Any, augment) -> Reader:
        """For `batches`. `images` is a map (see `is_map`); `augment` as in loader.py, or None."""
        assert is_map(images)
        file = str(images.filename)
        try:
            identity = file_identity(os.stat(file))
        except OSError:
            identity = (0, 0)  # gone already: the first worker reports it
        return MapReader(file, images.offset, images.shape, identity, augment)

    def batches(
        self, reader: Reader, pieces: Iterator[tuple], finish: Callable, turns: int = 1
    ) -> Iterator:
        """For each (rows, plan) of `pieces`, in order: finish(pictures).

        Args:
            pieces: rows (n,) int64 of the set; the plan of `reader.augment` for them, or None.
            finish: called with (n, height, width, channels) uint8; must not keep that array.
            turns: how many iterators, this one included, are used in turn.

        Raises:
            UserError: the file is gone, there is no room for two batches, or workers keep dying or
                hanging.
        """
        ahead: deque[Job] = deque()
        if reader not in self._readers:
            self._readers.append(reader)
        try:
            while self._next_is_ready(ahead, reader, pieces, turns):
                job = ahead[0]
                if job.failure is not None:
                    raise job.failure
                result = finish(self._ring.pictures(job.slot, len(job.rows), reader.shape))
                self._release(ahead.popleft())
                # Workers continue during training.
                self._send_ahead(ahead, reader, pieces, turns)
                yield result
        finally:
            for job in ahead:
                self._release(job)
            ahead.clear()
            self._ahead = [other for other in self._ahead if other is not ahead]

    def close(self) -> None:
        """Ends the workers and frees the memory."""
        self._closed = True
        if self._end is not None:
            self._end()
        self._ring = self._end = None

    # ---- jobs ---------------------------------------------------------------------------------

    def _next_is_ready(
        self, ahead: deque[Job], reader: Reader, pieces: Iterator, turns: int
    ) -> bool:
        """Waits for the next batch; False at the end."""
        while True:
            self._send_ahead(ahead, reader, pieces, turns)
            if not ahead or ahead[0].done:
                return bool(ahead)
            self._wait()

    def _send_ahead(self, ahead: deque[Job], reader: Reader, pieces: Iterator, turns: int) -> None:
        """Sends jobs while there are free slots for this iterator."""
        if self._ring is None:
            self._start()
        if not any(other is ahead for other in self._ahead):
            self._ahead.append(ahead)
        self._collect(timeout=0)
        waiting = deque(job for job in ahead if job.slot is None)  # those taken back before
        room = max(1, len(self._ring.array) // turns) - (len(ahead) - len(waiting))
        while True:
            if not waiting:  # even without a free slot: `ahead` is empty only at the end
                piece = next(pieces, None)
                if piece is None:
                    return
                ahead.append(Job(reader, *piece))
                waiting.append(ahead[-1])
            if room <= 0:
                return
            if not self._free:
                self._take_back_beside(ahead)
            if not self._free:
                return
            job, room = waiting.popleft(), room - 1
            job.slot = self._free.pop()
            self._send(min(self._members, key=lambda worker: len(worker.jobs)), job)

    def _take_back_beside(self, ahead: deque[Job]) -> None:
        """Frees the slots of the other iterators, which send their jobs again later."""
        for jobs in self._ahead:
            for place, job in enumerate(jobs):
                if jobs is not ahead and job.slot is not None:
                    self._release(job)
                    jobs[place] = Job(job.reader, job.rows, job.plan)

    def _release(self, job: Job) -> None:
        """Frees the job's slot: now if it is done, else when its worker has finished writing."""
        job.stale = True
        if job.done:
            self._free.append(job.slot)

    def _send(self, worker: Worker, job: Job) -> None:
        worker.jobs.append(job)
        number = self._readers.index(job.reader)
        try:
            if number not in worker.knows:
                worker.connection.send((number, job.reader))
                worker.knows.add(number)
            worker.connection.send(Request(number, job.slot, job.rows, job.plan))
        except OSError:
            pass  # the worker has died: `_collect` will send the job to another one

    def _wait(self) -> None:
        """Waits for an answer, and replaces workers that hang.

        Only the time spent here counts, a look at a time: while the run trains or is suspended
        answers are not read, and no worker is to blame.
        """
        look = min(LOOK, self._patience)
        started = time.monotonic()
        self._collect(look)
        waited = min(time.monotonic() - started, look)
        for worker in list(self._members):
            worker.waited = worker.waited + waited if worker.jobs else 0.0
            if worker.waited >= self._patience:
                self._replace_hanging(worker)

    def _collect(self, timeout: float) -> None:
        """Records finished jobs, and replaces workers that have died."""
        if timeout == 0 and not any(worker.jobs for worker in self._members):
            return
        members = {worker.connection: worker for worker in self._members}
        connection: Any
        for connection in connections.wait(members, timeout):
            worker = members[connection]
            try:
                failure = connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            self._deaths = 0
            worker.waited = 0.0
            job = worker.jobs.popleft()
            job.done, job.failure = True, failure
            if job.stale:
                self._free.append(job.slot)

    # ---- processes ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the workers are closed")
        slots = AHEAD * self.workers
        self._ring = Ring.create(slots, self.slot_bytes, self._warn, self._ranks)
        self._free = list(range(len(self._ring.array)))
        # Runs before multiprocessing waits for its children at exit, even without `close`.
        self._end = Finalize(self, end_all, (self._members, self._ring), exitpriority=20)
        for _ in range(self.workers):
            self._members.append(self._start_worker())

    def _start_worker(self) -> Worker:
        try:
            return Worker.start(self._ring)
        except UserError:
            self.close()
            raise

    def _replace(self, dead: Worker) -> None:
        """Replaces a worker that has died."""
        cause = dead.reap()
        self._deaths += 1
        if self._deaths >= DEATHS * self.workers:
            self.close()
            likely = "the disk that holds --cache_dir fails, or there is too little memory"
            if cause != "SIGBUS":
                likely = "there is too little memory"
            raise UserError(
                f"the worker processes keep dying ({cause}), most likely because {likely}: use "
                "fewer --workers (0: none) or a smaller --batch_size"
            ) from None
        self._warn(f"note: a worker process died ({cause}) and was replaced; no batch is lost")
        self._succeed(dead)

    def _replace_hanging(self, hanging: Worker) -> None:
        """Kills and replaces a worker that does not answer."""
        hanging.kill()
        job = hanging.jobs[0]
        job.hangs += 1
        if job.hangs >= HANGS:
            self.close()
            raise UserError(
                f"{HANGS} worker processes in turn gave no answer for {self._patience:g} seconds "
                "over the same batch: see whether the disk that holds the pictures answers, and "
                "resume with --resume"
            )
        self._warn(
            f"note: a worker process gave no answer for {self._patience:g} seconds and was "
            "replaced; no batch is lost"
        )
        self._succeed(hanging)

    def _succeed(self, old: Worker) -> None:
        """Starts another worker for the jobs of an old one, which has ended."""
        worker = self._start_worker()
        self._members[self._members.index(old)] = worker
        for job in old.jobs:
            if job.stale:
                self._free.append(job.slot)
            else:
                self._send(worker, job)
