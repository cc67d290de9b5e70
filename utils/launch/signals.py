"""Notes SIGINT and SIGTERM, by which the training loop finishes the step, saves and stops."""

import contextlib
import os
import signal
import sys
import time

from utils.launch.environment import LAUNCH_FOLDER

# In a launched process a second signal this soon is ignored.
REPEATED_SECONDS = 3.0
# After this time `Stopped` is raised again if it was raised where Python discards exceptions.
AGAIN_SECONDS = 0.01


class Stopped(BaseException):
    """A signal has ended the run, with exit code 130 or 143. `line` says what was saved and how to
    resume."""

    def __init__(self, signum: int, line: str):
        super().__init__(line)
        self.exit_code, self.line = 128 + signum, line


class Stopping:
    """Whether a signal stops the run and whether a checkpoint is due: the same answer on all ranks.

    Args:
        signals: of this process.
        agree: (numbers) -> the maximum of each over the ranks; None: a single process. An
            `Agreement` returns that of the previous call, so ranks stop one step later.

    Attributes:
        signum: the signal that stops the run; None: none so far.
    """

    def __init__(self, signals, agree=None):
        self.signals, self.agree = signals, agree
        self.signum: int | None = None

    def ask(self, due: bool = False) -> bool:
        """Whether a checkpoint is due on any rank; notes in `signum` whether to stop.
        Collective."""
        numbers = self.signals.received or 0, int(due)
        signum, due = self.agree(*numbers) if self.agree else numbers
        self.signum = self.signum or signum or None
        return bool(due)

    def asked(self) -> bool:
        """Whether the run is to stop. Collective."""
        self.ask()
        return self.signum is not None


class Signals:
    """Catches SIGINT and SIGTERM from its construction on.

    Until `defer` is called a signal raises `Stopped` at once, as nothing is trained yet. From then
    on it only sets `received`, which the loop reads after every step. A second signal ends the
    process immediately, but for the repetition that a launched process may get.
    """

    def __init__(self):
        self.received: int | None = None
        self._deferred = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._raise_again

    def _handle(self, signum, frame):
        launched = self.received is not None and LAUNCH_FOLDER in os.environ
        if launched and time.monotonic() - self._first < REPEATED_SECONDS:
            return  # a scheduler may signal the processes and the launcher, which forwards it
        if self.received is not None:
            os.write(2, b"stopped at once by a second signal\n")
            os._exit(128 + signum)
        self.received, self._first = signum, time.monotonic()
        self._stop_unless_deferred()

    def _stop_unless_deferred(self, *_) -> None:
        if self.received is not None and not self._deferred:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the timer of `_raise_again`
            raise Stopped(self.received, "stopped before the first step: nothing to save")

    def _raise_again(self, unraisable) -> None:
        """A signal may arrive in the callback of a weak reference or in `__del__`, where Python
        ignores exceptions: a timer raises `Stopped` again in the code that follows."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._unraisable(unraisable)
            return
        signal.signal(signal.SIGALRM, self._stop_unless_deferred)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)

    def defer(self) -> None:
        """From now on a signal only sets `received`."""
        self._stop_unless_deferred()  # a signal may have come where none could be raised
        self._deferred = True

    @contextlib.contextmanager
    def held(self):
        """Delays `Stopped` to the end of the block, for code in which an exception would abort the
        process."""
        before, self._deferred = self._deferred, True
        yield
        self._deferred = before
        self._stop_unless_deferred()
