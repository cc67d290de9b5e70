"""An object in a process of its own, whose methods are called from here.

Contenders in one process would share its heap and its malloc settings, and on a GPU an error in one
kernel would end the work of all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from pathlib import Path

from benchmarks.budget import ChildError, in_a_line
from benchmarks.common import silent
from utils.machine.host_memory import peak_rss

SECONDS_TO_END = 10
PEAK, END = "peak_rss", "end"  # called as if they were methods of the object


class Child:
    """A process with an object. It leads a process group, which ends with it, and it ends with the
    process that started it.

    Args:
        make: () -> the object, called there; picklable.
        environment: additional variables of the process.

    Raises:
        ChildError: an error there, or the process is gone. Any exception here, OutOfTime too,
            kills the group.
    """

    def __init__(self, make: Callable[[], object], environment: dict[str, str] | None = None):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make))
        # Also when this object is collected, and at exit, where Python would wait for the process.
        self.kill = weakref.finalize(self, _kill, self.process)
        try:
            with theirs, _added_to_environment(environment or {}):
                self.process.start()
            self._answer()
        except BaseException:
            self.kill()
            raise

    def call(self, name: str, *arguments):
        """Calls a method of the object; returns its result."""
        try:
            self.pipe.send((name, arguments))
            return self._answer()
        except OSError:
            self.kill()
            raise ChildError("its process is gone") from None
        except BaseException:
            self.kill()
            raise

    def peak_rss(self) -> int:
        """Bytes: the peak of the process's resident memory since the object was made, beyond what
        it had then; without its own children."""
        return self.call(PEAK)

    def close(self) -> None:
        """Ends the process, if it is still there."""
        with contextlib.suppress(OSError):
            self.pipe.send((END, ()))
            self.process.join(SECONDS_TO_END)
        self.kill()

    def _answer(self):
        try:
            error, found = self.pipe.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            lost = (
                "was killed, perhaps because memory ran out" if code == -9 else f"ended with {code}"
            )
            raise ChildError(f"its process {lost}") from None
        if error is not None:
            raise ChildError(error)
        return found


def _serve(pipe, make: Callable[[], object]) -> None:
    """Answers (error or None, result) until it is told to end."""
    os.setsid()  # Ctrl-C reaches the parent alone
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with silent():
        try:
            made = make()
            before = new_peak()
            pipe.send((None, None))
            while (asked := pipe.recv())[0] != END:
                name, arguments = asked
                found = peak_rss() - before if name == PEAK else getattr(made, name)(*arguments)
                pipe.send((None, found))
        except (EOFError, BrokenPipeError):  # the parent is gone
            _kill_group(os.getpid())
        except Exception as error:
            pipe.send((in_a_line(error), None))


def _kill(process) -> None:
    """Kills the process and its group."""
    if process.pid is not None:
        _kill_group(process.pid)
        process.kill()  # if it leads no group yet
        process.join()


def _end_with_parent() -> None:
    parent_process().join()
    _kill_group(os.getpid())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _added_to_environment(environment: dict[str, str]):
    """Adds to os.environ for processes started within."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def new_peak() -> int:
    """Resets the peak of resident memory, if the system can, and returns it in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_rss()
