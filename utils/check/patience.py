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
        self,
        name: str,
        seconds: float,
        advice: str,
        missing: Callable[[], str] = lambda: "",
        before: Callable[[str], None] = lambda line: None,
    ) -> Iterator[None]:
        """
        Args:
            name: of this part of the check.
            seconds: that it may take.
            advice: what to look at then.
            missing: asked then which processes do not respond; returns text for the line.
            before: called with what went wrong before the process ends.
        """

        def give_up(what: str) -> None:
            line = f"{name} {what}{missing()}: {advice}"
            if note_exit_code(1):
                print(f"error: {socket.gethostname()}: {line}", file=sys.stderr, flush=True)
            before(line)
            self._end(1)

        timer = threading.Timer(seconds, give_up, (f"does not end within {seconds:g} s",))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            timer.cancel()
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            give_up(f"fails ({reason})")
        finally:
            timer.cancel()
