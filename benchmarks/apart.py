"""A contender in a process of its own, which waits while others take their turns.

On a CPU malloc is one for the whole process: what a contender frees another one finds there, and
how it is told to treat freed memory holds for all. People run one at a time.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from benchmarks.budget import Told, in_a_line
from benchmarks.loop import silent

SECONDS_TO_END = 10


class Apart:
    """What has `steps` and `shares` (see contenders.py), in another process.

    Args:
        make: () -> that, called there; to be pickled.

    Raises:
        Told: it fails there, or its process is gone. Whatever is raised here, be it that time is
            up, ends the process.
    """

    def __init__(self, make: Callable[[], object]):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make))
        self.process.start()
        theirs.close()
        self._answer()

    def steps(self, count: int) -> float:
        """Takes so many; seconds."""
        return self._ask("steps", count)

    def shares(self) -> dict[str, float]:
        """Of the time of the last steps, by phase."""
        return self._ask("shares")

    def peak(self) -> int:
        """Bytes that its process has had at most, beyond what was there before it was made."""
        return self._ask("peak")

    def close(self) -> None:
        """Ends the process."""
        self.pipe.close()  # which it reads to the end
        self.process.join(SECONDS_TO_END)
        self._kill()

    def _ask(self, *words):
        try:
            self.pipe.send(words)
        except OSError:
            self._kill()
            raise Told("its process is gone") from None
        return self._answer()

    def _answer(self):
        try:
            error, found = self.pipe.recv()
        except (EOFError, OSError):
            self._kill()
            raise Told(f"its process ended with {self.process.exitcode}") from None
        except BaseException:
            self._kill()
            raise
        if error is not None:
            self._kill()
            raise Told(error)
        return found

    def _kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(pipe, make: Callable[[], object]) -> None:
    """Answers (error or None, what was asked for), until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    with silent():
        try:
            before = taken_at_most()
            contender = make()
            pipe.send((None, None))
            while True:
                name, *words = pipe.recv()
                if name == "peak":
                    pipe.send((None, taken_at_most() - before))
                else:
                    pipe.send((None, getattr(contender, name)(*words)))
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:
            pipe.send((in_a_line(error), None))


def taken_at_most() -> int:
    """Bytes of memory that this process has had at most."""
    try:  # without those of the process that has started it
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
