"""Worker processes that read a memory map, or decode, and augment: for data sets that do not fit
in memory.

Their pictures may have to be read from the disk, for which the training step must not wait. The
training process draws which samples a batch has and how each is augmented, as it does without
workers (see loader.py); a worker carries that out and puts the batch into shared memory. So batches
are the same to the bit with any number of workers, even if workers die.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection as connections
from multiprocessing import get_context
from multiprocessing.util import Finalize

import numpy as np

from utils.data.shared_ring import Ring
from utils.data.worker_process import (
    SIGNALS,
    Failure,
    MapReader,
    Reader,
    Request,
    file_identity,
    is_map,
    work,
)
from utils.errors import UserError

AHEAD = 2  # batches in preparation per worker
DEATHS = 3  # per worker, without a finished batch in between, after which the run gives up


class _Job:
    """A batch in preparation.

    Attributes:
        slot: for the batch; None until the job is sent to a worker.
        done: the worker has answered.
        stale: nobody needs the batch any more.
    """

    def __init__(self, reader: Reader, rows: np.ndarray, plan):
        self.reader, self.rows, self.plan = reader, rows, plan
        self.slot: int | None = None
        self.done = self.stale = False
        self.failure: Exception | None = None


class _Worker:
    """A process, our end of the pipe to it, and the jobs sent to it, the oldest first."""

    def __init__(self, process, connection):
        self.process, self.connection = process, connection
        self.jobs: deque[_Job] = deque()
        self.knows: set[int] = set()  # numbers of readers


class WorkerPool:
    """The workers of all loaders of a task, started when the first batch is needed.

    The iterator that was used last has the workers: batches read ahead for another one are dropped,
    and read again when that one continues.

    Args:
        workers: number of processes.
        slot_bytes: size of the largest batch.
        warn: called with a line about a problem that was solved.
    """

    def __init__(self, workers: int, slot_bytes: int, warn: Callable[[str], None]):
        assert workers > 0
        self.workers, self.slot_bytes, self._warn = workers, slot_bytes, warn
        self._ring: Ring | None = None
        self._free: list[int] = []  # slots
        self._members: list[_Worker] = []
        self._active: deque[_Job] | None = None  # the jobs of the last iterator
        self._readers = 0
        self._deaths = 0  # since the last finished batch
        self._end: Finalize | None = None
        self._closed = False

    def resize(self, slot_bytes: int) -> None:
        """For batches of another size, before the first one is read."""
        self.slot_bytes = slot_bytes

    def numbered(self, reader: Reader) -> Reader:
        """The reader with a number of its own, for `batches`."""
        self._readers += 1
        return dataclasses.replace(reader, number=self._readers)

    def reader(self, images: np.ndarray, augment) -> Reader:
        """For `batches`. `images` is a map (see `is_map`); `augment` as in loader.py, or None."""
        assert is_map(images)
        file = str(images.filename)
        try:
            identity = file_identity(os.stat(file))
        except OSError:
            identity = (0, 0)  # gone already: the first worker reports it
        return self.numbered(MapReader(0, file, images.offset, images.shape, identity, augment))

    def batches(self, reader: Reader, pieces: Iterator[tuple], finish: Callable) -> Iterator:
        """For each (rows, plan) of `pieces`, in order: finish(pictures).

        Args:
            pieces: rows (n,) int64 of the set; the plan of `reader.augment` for them, or None.
            finish: called with (n, height, width, channels) uint8; must not keep that array.

        Raises:
            UserError: the file is gone, there is no room for two batches, or workers keep dying.
        """
        ahead: deque[_Job] = deque()
        try:
            while self._next_is_ready(ahead, reader, pieces):
                job = ahead[0]
                if job.failure is not None:
                    raise job.failure
                result = finish(self._ring.pictures(job.slot, len(job.rows), reader.shape))
                self._release(ahead.popleft())
                self._send_ahead(ahead, reader, pieces)  # workers continue during training
                yield result
        finally:
            for job in ahead:
                self._release(job)
            ahead.clear()

    def close(self) -> None:
        """Ends the workers and frees the memory."""
        self._closed = True
        if self._end is not None:
            self._end()
        self._ring = self._end = None

    # ---- jobs ---------------------------------------------------------------------------------

    def _next_is_ready(self, ahead: deque[_Job], reader: Reader, pieces: Iterator) -> bool:
        """Waits for the next batch; False at the end."""
        while True:
            self._send_ahead(ahead, reader, pieces)
            if not ahead or ahead[0].done:
                return bool(ahead)
            self._collect(timeout=None)

    def _send_ahead(self, ahead: deque[_Job], reader: Reader, pieces: Iterator) -> None:
        """Sends jobs while there are free slots."""
        if self._ring is None:
            self._start()
        if self._active is not ahead:
            self._take_back(self._active)
            self._active = ahead
        self._collect(timeout=0)
        waiting = deque(job for job in ahead if job.slot is None)  # those taken back before
        while True:
            if not waiting:  # even without a free slot: `ahead` is empty only at the end
                piece = next(pieces, None)
                if piece is None:
                    return
                ahead.append(_Job(reader, *piece))
                waiting.append(ahead[-1])
            if not self._free:
                return
            job = waiting.popleft()
            job.slot = self._free.pop()
            self._send(min(self._members, key=lambda worker: len(worker.jobs)), job)

    def _take_back(self, jobs: deque[_Job] | None) -> None:
        """Frees the slots of these jobs for another iterator; theirs sends them again later."""
        for place, job in enumerate(jobs or ()):
            self._release(job)
            jobs[place] = _Job(job.reader, job.rows, job.plan)

    def _release(self, job: _Job) -> None:
        """Frees the job's slot: now if it is done, else when its worker has finished writing."""
        job.stale = True
        if job.done:
            self._free.append(job.slot)

    def _send(self, worker: _Worker, job: _Job) -> None:
        worker.jobs.append(job)
        try:
            if job.reader.number not in worker.knows:
                worker.connection.send(job.reader)
                worker.knows.add(job.reader.number)
            worker.connection.send(Request(job.reader.number, job.slot, job.rows, job.plan))
        except OSError:
            pass  # the worker has died: `_collect` will send the job to another one

    def _collect(self, timeout: float | None) -> None:
        """Records finished jobs, and replaces workers that have died."""
        if timeout == 0 and not any(worker.jobs for worker in self._members):
            return
        members = {worker.connection: worker for worker in self._members}
        for connection in connections.wait(members, timeout):
            worker = members[connection]
            try:
                failure = connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            self._deaths = 0
            job = worker.jobs.popleft()
            job.done, job.failure = True, _exception(failure)
            if job.stale:
                self._free.append(job.slot)

    # ---- processes ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the workers are closed")
        self._ring = Ring.create(AHEAD * self.workers, self.slot_bytes, self._warn)
        self._free = list(range(len(self._ring.array)))
        # Runs before multiprocessing waits for its children at exit, even without `close`.
        self._end = Finalize(self, _end, (self._members, self._ring), exitpriority=20)
        for _ in range(self.workers):
            self._members.append(self._start_worker())

    def _start_worker(self) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(theirs, self._ring.name, *self._ring.array.shape), daemon=True
        )
        # The child inherits the blocked signals, and ignores them once it runs.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        except OSError as error:
            ours.close()
            self.close()
            raise UserError(
                f"cannot start a reading process: {error.strerror or error}; use fewer --workers"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        return _Worker(process, ours)

    def _replace(self, dead: _Worker) -> None:
        """Starts another worker for the jobs of one that has died."""
        _reap(dead)
        self._deaths += 1
        cause = _cause(dead.process.exitcode)
        if self._deaths >= DEATHS * self.workers:
            self.close()
            likely = "the disk that holds --cache_dir fails, or there is too little memory"
            if cause != "SIGBUS":
                likely = "there is too little memory"
            raise UserError(
                f"the reading processes keep dying ({cause}), most likely because {likely}: use "
                "fewer --workers (0: none) or a smaller --batch_size"
            ) from None
        self._warn(f"note: a reading process died ({cause}) and was replaced; no batch is lost")
        worker = self._start_worker()
        self._members[self._members.index(dead)] = worker
        for job in dead.jobs:
            if job.stale:
                self._free.append(job.slot)
            else:
                self._send(worker, job)


def _end(members: list[_Worker], ring: Ring) -> None:
    for worker in members:  # they have nothing to save
        worker.process.kill()
    for worker in members:
        _reap(worker)
    members.clear()
    ring.close()


def _reap(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.join(1)
    if worker.process.is_alive():  # although its pipe is closed
        worker.process.kill()
        worker.process.join()


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


def _exception(failure: Failure | None) -> Exception | None:
    if failure is None:
        return None
    if failure.is_users:
        return UserError(failure.text)
    return RuntimeError(f"in a reading process:\n{failure.text}")
