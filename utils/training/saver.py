"""When a checkpoint is due, and its writing beside the training.

The copy is taken between two steps; serialising, hashing and writing it to disk then go on in a
thread, one checkpoint at a time. Only the last one, before the process ends, is waited for.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from utils.errors import UserError
from utils.files import reason
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.training.checkpoint import Checkpoint, Checkpoints


class Saver:
    """Args:
    store: where checkpoints go.
    metrics: flushed to disk before a checkpoint that counts on its lines.
    console: told what could not be written.
    every_steps, every_seconds: how often; either.
    """

    def __init__(
        self,
        store: Checkpoints,
        metrics: MetricsLog,
        console: Console,
        every_steps: int | None = None,
        every_seconds: float | None = None,
    ):
        self.store, self.metrics, self.console = store, metrics, console
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future] | None = None  # step, result
        self.start(0)

    def start(self, step: int) -> None:
        """The intervals count from here."""
        self.saved_step, self._saved_time = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        if self.every_steps is not None:
            return step - self.saved_step >= self.every_steps
        return time.monotonic() - self._saved_time >= (self.every_seconds or float("inf"))

    def save(self, checkpoint: Checkpoint, best_step: int | None, final: bool) -> None:
        """Takes a copy and has it written. A disk that is full is said, and tried again when the
        next one is due; only the last checkpoint (`final`) must succeed, else UserError."""
        self.wait()
        self.start(checkpoint.step)
        try:
            checkpoint.state["metrics_bytes"] = self.metrics.position()
        except OSError as error:
            self._report(error, checkpoint.step, final)
            return
        copy = checkpoint.copy()
        self._writing = checkpoint.step, self._thread.submit(self._write, copy, best_step)
        if final:
            self.wait(final=True)

    def _write(self, checkpoint: Checkpoint, best_step: int | None) -> None:
        self.metrics.sync()
        self.store.save(checkpoint, best_step)

    def poll(self) -> None:
        """Says what went wrong with the one being written, if that is known already."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self, final: bool = False) -> None:
        """Until the one being written is on disk, or has failed, which is said."""
        if self._writing is None:
            return
        (step, future), self._writing = self._writing, None
        try:
            future.result()
        except OSError as error:
            self._report(error, step, final)

    def _report(self, error: OSError, step: int, final: bool) -> None:
        before = [saved for saved in self.store.steps() if saved < step]
        last = f"that of step {before[-1]} is intact" if before else "there is none before it"
        line = f"no checkpoint of step {step}: {reason(error)}; {last}"
        if final:
            raise UserError(f"{line}; make room and --resume {self.store.folder.parent}") from None
        self.console.say(f"{line}; the run goes on and tries again")
