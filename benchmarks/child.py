"""An object in a process of its own, which waits while others take their turns.

On a CPU malloc is one for the whole process: what one contender frees another one finds there, and
how it is told to treat freed memory holds for all. On a GPU an error in one kernel ends all work of
the process. People run one at a time.
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
PEAK, END = "peak_rss", "end"  # asked for as if they were methods of the object


class Child:
    """A process with an object. It is the first of a group of processes, which end with it, and it
    ends with the process that has started it.

    Args:
        make: () -> the object, called there; picklable.
        environment: variables that this process has besides.

    Raises:
        ChildError: it fails there, or the process is gone. Whatever is raised here, be it that time
            is up, kills the group.
    """

    def __init__(self, make: Callable[[], object], environment: dict[str, str] | None = None):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make))
        # Also when nobody has it any more, and when Python ends, which would wait for it else.
        self.kill = weakref.finalize(self, _kill, self.process)
        try:
            with theirs, _also(environment or {}):
                self.process.start()
            self._answer()
        except BaseException:
            self.kill()
            raise

    def call(self, name: str, *arguments):
        """What that method of the object returns."""
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
        """Bytes of resident memory that the process has had at most since the object was made,
        beyond those that it had then; without its own children."""
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
            lost = "was killed, perhaps for want of memory" if code == -9 else f"ended with {code}"
            raise ChildError(f"its process {lost}") from None
        if error is not None:
            raise ChildError(error)
        return found


def _serve(pipe, make: Callable[[], object]) -> None:
    """Answers (error or None, what was asked for), until it is to end."""
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
    """And its group."""
    if process.pid is not None:
        _kill_group(process.pid)
        process.kill()  # in case that it has no group yet
        process.join()


def _end_with_parent() -> None:
    parent_process().join()
    _kill_group(os.getpid())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _also(environment: dict[str, str]):
    """os.environ with these, for what is started within."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def new_peak() -> int:
    """Bytes of resident memory that the process has, from which on its peak is counted. Where the
    system cannot forget the peak so far, it is that one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_rss()
