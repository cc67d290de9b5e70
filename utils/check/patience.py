"""Ends a check of which a part fails, or does not end."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from utils.launch.environment import note_exit_code


class Patience:
    """Ends this process with exit code 1, after an error line, if a part of the check does not end
    in time or raises a RuntimeError, as PyTorch does where communication or a GPU fails. On each
    host one process says it.

    Args:
        end: called with the exit code.
    """

    def __init__(self, end: Callable[[int], None] = os._exit):
        self._end = end

    @contextlib.contextmanager
    def part(
        self, name: str, seconds: float, advice: str, before: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """
        Args:
            name: of this part of the check.
            seconds: that it may take.
            advice: what to look at then.
            before: called with what went wrong before the process ends.
        """
        line = f"{name} does not end within {seconds:g} s: {advice}"
        timer = threading.Timer(seconds, self._give_up, (line, before))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            timer.cancel()
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._give_up(f"{name} fails ({reason}): {advice}", before)
        finally:
            timer.cancel()

    def _give_up(self, line: str, before: Callable[[str], None] | None) -> None:
        if note_exit_code(1):
            print(f"error: {socket.gethostname()}: {line}", file=sys.stderr, flush=True)
        if before is not None:
            before(line)
        self._end(1)
