"""Decides when a checkpoint is due, and writes it in the background.

The tensors are copied between two steps; a thread then serialises, hashes and writes them, one
checkpoint at a time. Training waits only for the last one, before the process ends.

With many processes rank 0 writes; if the model is sharded, each rank writes its rows, and their
threads tell each other whether that succeeded.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..errors import UserError
from ..exchange import Exchange
from ..files import reason, remedy
from ..reporting.console import Console
from ..reporting.metrics import MetricsLog, NoMetrics
from .checkpoint import RUN_INFO, Checkpoint, Checkpoints


class Saver:
    """Writes the checkpoints of a run at an interval.

    Args:
        store: where checkpoints go.
        metrics: flushed to disk before a checkpoint that refers to its lines; used on rank 0 only.
        console: prints what could not be written, on rank 0.
        every_steps, every_seconds: the interval; one of the two.
        exchange: with the other ranks, for this object alone: its collectives run in the thread, at
            the same time as those of the training loop. None: one process.
        run_info: stored in every checkpoint (see `Checkpoint.run_info`).
    """

    def __init__(
        self,
        store: Checkpoints,
        metrics: MetricsLog | NoMetrics,
        console: Console,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        exchange: Exchange | None = None,
        run_info: dict | None = None,
    ):
        self.run_info = run_info or {}
        self.store, self.metrics, self.console = store, metrics, console
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self.exchange = exchange or Exchange()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future] | None = None  # step, result
        self.start(0)

    @property
    def run_folder(self) -> Path:
        """The run's, which the checkpoints are in."""
        return self.store.folder.parent

    def start(self, step: int) -> None:
        """The interval begins here."""
        self.saved_step, self._saved_time = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        if self.every_steps is not None:
            return step - self.saved_step >= self.every_steps
        return time.monotonic() - self._saved_time >= (self.every_seconds or float("inf"))

    def save(self, checkpoint: Checkpoint, best_step: int | None, final: bool) -> None:
        """Copies the checkpoint and starts to write it; every rank calls this at the same steps. If
        the disk is full, a line says so and the next checkpoint tries again; only the last one
        (`final`) must succeed: otherwise every rank raises UserError."""
        self.wait()
        self.start(checkpoint.step)
        checkpoint.state[RUN_INFO] = self.run_info
        first, divided = self.exchange.rank == 0, checkpoint.rows is not None
        failure = None
        if first:
            try:  # where a resumed run cuts off the metrics
                checkpoint.state["metrics_bytes"] = self.metrics.position()
            except OSError as error:
                failure = error
        if divided or (first and failure is None):
            future = self._thread.submit(self._write, checkpoint.copy(), best_step, failure)
            self._writing, failure = (checkpoint.step, future), None
        line = None if failure is None else self._line(failure, checkpoint.step)
        if final:
            line = next(filter(None, self.exchange.gather_json(self._result() or line)), None)
            if line is not None:
                raise UserError(f"{line} and --resume {self.run_folder}")
        self._say(line)

    def _write(
        self, checkpoint: Checkpoint, best_step: int | None, failure: OSError | None
    ) -> None:
        """Runs in the thread. `failure`: of rank 0 before writing; passed to all ranks."""

        def ready() -> None:
            if failure is not None:
                raise failure
            self.metrics.sync()

        exchange = None if checkpoint.rows is None else self.exchange
        self.store.save(checkpoint, best_step, exchange, ready)

    def poll(self) -> None:
        """Prints why the checkpoint in progress has failed, if it has."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint in progress is on disk; prints why if it has failed."""
        self._say(self._result())

    def _result(self) -> str | None:
        """Waits for the checkpoint in progress; returns what went wrong."""
        if self._writing is None:
            return None
        (step, future), self._writing = self._writing, None
        try:
            future.result()
        except OSError as error:
            return self._line(error, step)
        return None

    def _line(self, error: OSError, step: int) -> str:
        before = [saved for saved in self.store.steps() if saved < step]
        last = f"that of step {before[-1]} is intact" if before else "there is none before it"
        way = remedy(error, self.store.folder)
        return f"no checkpoint of step {step}: {reason(error)}; {last}; {way}"

    def _say(self, line: str | None) -> None:
        if line is not None and self.exchange.rank == 0:
            self.console.say(f"{line}; the run goes on and tries again")
