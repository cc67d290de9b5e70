"""Catches the signals that stop a run, and tells the training loop to finish its step, save and
stop."""

import contextlib
import os
import signal
import sys
import threading
import time

from .environment import LAUNCH_FOLDER

# A launched process ignores a second signal that comes within so many seconds of the first.
REPEATED_SECONDS = 3.0
# Seconds until a `StoppedBySignal` that Python has discarded is raised again (`_raise_again`).
AGAIN_SECONDS = 0.01


def stopping_signals() -> list[signal.Signals]:
    """Those that stop a run: SIGINT, SIGTERM, and SIGHUP, which a process gets when its terminal
    closes, unless that is ignored, as after nohup."""
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


class StoppedBySignal(BaseException):
    """A signal has ended the run, with exit code 129, 130 or 143. `line` says what was saved and
    how to resume."""

    def __init__(self, signum: int, line: str):
        super().__init__(line)
        self.exit_code, self.line = 128 + signum, line


class AgreedSignal:
    """The signal on which all ranks stop after the same step, whichever of them it reached. The
    same poll tells them whether a checkpoint is due, and whether a rank wants training to end.

    Args:
        agree: (numbers) -> the maximum of each over the ranks; None: a single process. An
            `Agreement` returns the result of the previous call, so all ranks stop one call after
            the signal; of several signals the largest number counts.

    Attributes:
        signum: the signal that stops the run; None: none so far.
        wants_end: whether this rank wants training to end here, as if all steps were done.
        ends: whether a rank does, as all know.
    """

    def __init__(self, signals, agree=None):
        self.signals, self.agree = signals, agree
        self.signum: int | None = None
        self.wants_end = self.ends = False

    def poll(self, due: bool = False) -> bool:
        """Whether a checkpoint is due on any rank; sets `signum` if the run is to stop, and `ends`.
        Collective."""
        numbers = self.signals.received or 0, 2 if self.wants_end else int(due)
        signum, wish = self.agree(*numbers) if self.agree else numbers
        self.ends = self.ends or wish == 2  # which saves, too
        self.signum = self.signum or signum or None  # the first one stays
        return wish == 1

    def arrived(self) -> bool:
        """Whether the run is to stop. Collective."""
        self.poll()
        return self.signum is not None


class Signals:
    """Catches `stopping_signals` from its construction on.

    Until `defer` is called a signal raises `StoppedBySignal` at once, as this process has trained
    nothing yet; `held` delays that for a block. After `defer` it only sets `received`, which the
    loop reads between steps. A second signal ends the process immediately; a launched one ignores
    it within REPEATED_SECONDS.

    Args:
        may_end: whether a second signal ends the process; else it raises KeyboardInterrupt.
    """

    def __init__(self, may_end: bool = True):
        self.received: int | None = None
        self._first, self._deferred, self._may_end = 0.0, False, may_end
        is_main = threading.current_thread() is threading.main_thread()
        for signum in stopping_signals() if is_main else ():  # Python allows it in no other thread
            signal.signal(signum, self._handle)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._raise_again

    def _handle(self, signum, frame):
        launched = self.received is not None and {LAUNCH_FOLDER, "RANK"} & {*os.environ}
        if launched and time.monotonic() - self._first < REPEATED_SECONDS:
            return  # a scheduler may signal the processes and the launcher, which forwards it
        if self.received is not None and not self._may_end:
            raise KeyboardInterrupt
        if self.received is not None:
            os.write(2, b"stopped at once by a second signal\n")
            os._exit(128 + signum)
        self.received, self._first = signum, time.monotonic()
        self._stop_unless_deferred()

    def _stop_unless_deferred(self, *_) -> None:
        if self.received is not None and not self._deferred:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the timer of `_raise_again`
            raise StoppedBySignal(self.received, "stopped before the first step: nothing to save")

    def _raise_again(self, unraisable) -> None:
        """A signal may arrive in the callback of a weak reference or in `__del__`, where Python
        ignores exceptions: a timer raises `StoppedBySignal` again in the code that follows."""
        if not isinstance(unraisable.exc_value, StoppedBySignal):
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
        """Delays `StoppedBySignal` to the end of the block, for code in which an exception would
        abort the process."""
        before, self._deferred = self._deferred, True
        yield
        self._deferred = before
        self._stop_unless_deferred()
