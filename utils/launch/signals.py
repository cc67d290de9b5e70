"""SIGINT and SIGTERM: finish the step, save, and exit with 130 or 143."""

import contextlib
import os
import signal
import sys
import time

from utils.launch.environment import LAUNCH_FOLDER

# Of a process that was launched: a second signal so soon is the first one once more.
REPEATED_SECONDS = 3.0
# How soon `Stopped` is raised again where Python ignored it.
AGAIN_SECONDS = 0.01


class Stopped(BaseException):
    """A signal ended the run. `line` says what was saved and how to go on."""

    def __init__(self, signum: int, line: str):
        super().__init__(line)
        self.exit_code, self.line = 128 + signum, line


class Stopping:
    """Whether a signal stops the run, and whether a checkpoint is due, as all ranks know it.

    Args:
        signals: of this process.
        agree: (numbers) -> the largest of each over the ranks, at once or those of the call
            before; None: a process alone.

    Attributes:
        signum: of the signal that stops the run; None: none so far.
    """

    def __init__(self, signals, agree=None):
        self.signals, self.agree = signals, agree
        self.signum: int | None = None

    def ask(self, due: bool = False) -> bool:
        """Whether a checkpoint is due. With many ranks to be called by all of them alike."""
        numbers = self.signals.received or 0, int(due)
        signum, due = self.agree(*numbers) if self.agree else numbers
        self.signum = self.signum or signum or None
        return bool(due)

    def asked(self) -> bool:
        """Whether the run is to stop."""
        self.ask()
        return self.signum is not None


class Signals:
    """Catches the two signals from the moment it is made.

    Until `defer` is called a signal raises `Stopped` at once: nothing is trained yet. From then on
    it is only noted in `received`, which the loop reads after every step. A second signal ends
    the process on the spot.
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
            return  # a scheduler may tell the processes and their launcher, which passes it on
        if self.received is not None:
            os.write(2, b"stopped at once by a second signal\n")
            os._exit(128 + signum)
        self.received, self._first = signum, time.monotonic()
        self._stop_unless_deferred()

    def _stop_unless_deferred(self, *_) -> None:
        if self.received is not None and not self._deferred:
            signal.setitimer(signal.ITIMER_REAL, 0)  # once is enough
            raise Stopped(self.received, "stopped before the first step: nothing to save")

    def _raise_again(self, unraisable) -> None:
        """A signal may come within the callback of a weak reference or a `__del__`, where Python
        ignores what is raised: a timer raises it again in the code that follows."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._unraisable(unraisable)
            return
        signal.signal(signal.SIGALRM, self._stop_unless_deferred)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)

    def defer(self) -> None:
        """From now on a signal is only noted."""
        self._stop_unless_deferred()  # it came while an exception could not be raised
        self._deferred = True

    @contextlib.contextmanager
    def held(self):
        """A signal within it raises `Stopped` at its end: for what ends the process where an
        exception is raised in its midst."""
        before, self._deferred = self._deferred, True
        yield
        self._deferred = before
        self._stop_unless_deferred()
