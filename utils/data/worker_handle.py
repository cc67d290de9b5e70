"""The training process's side of a worker: its process, the pipe to it and its jobs."""

from __future__ import annotations

import signal
from collections import deque
from multiprocessing import get_context

import numpy as np

from utils.data.shared_ring import Ring
from utils.data.worker_process import SIGNALS, Failure, Reader, work
from utils.errors import UserError


class Job:
    """A batch in preparation.

    Attributes:
        slot: for the batch; None until the job is sent to a worker.
        done: the worker has answered.
        stale: nobody needs the batch any more.
        hangs: how many workers have hung over it.
    """

    def __init__(self, reader: Reader, rows: np.ndarray, plan):
        self.reader, self.rows, self.plan = reader, rows, plan
        self.slot: int | None = None
        self.done = self.stale = False
        self.failure: Exception | None = None
        self.hangs = 0


class Worker:
    """A process, our end of the pipe to it, and the jobs sent to it, the oldest first.

    Attributes:
        waited: seconds that training has waited since the worker last answered or had no job.
    """

    def __init__(self, process, connection):
        self.process, self.connection = process, connection
        self.jobs: deque[Job] = deque()
        self.knows: set[int] = set()  # numbers of readers
        self.waited = 0.0

    @classmethod
    def start(cls, ring: Ring) -> Worker:
        """Raises UserError if no process can be started."""
        context = get_context("spawn")
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


def exception(failure: Failure | None) -> Exception | None:
    if failure is None:
        return None
    if failure.is_users:
        return UserError(failure.text)
    return RuntimeError(f"in a worker process:\n{failure.text}")
