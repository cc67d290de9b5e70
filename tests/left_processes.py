"""Ends what tests have started when pytest ends, even if that was killed and could not clean up.

A process waits beside each pytest for its end, and then kills all that have its mark in their
environment: what a test starts inherits it, and what that starts, in whatever session or group.
Linux only. A plugin of pytest, for conftest.py.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "STARTED_BY_PYTEST"


def pytest_configure(config) -> None:
    if sys.platform != "linux":
        return
    # A pytest within another one, such as a worker of pytest-xdist, has the mark of both.
    mark = os.environ[MARK] = f"{os.environ.get(MARK, '')}{os.getpid()}/"
    config.waits_for_end = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{MARK}={mark}"],
        env={},
        start_new_session=True,  # signals to the group of pytest do not reach it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def marked(mark: bytes) -> list[int]:
    """The ids of the processes whose environment contains the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to someone else
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_after(process: int, mark: bytes) -> None:
    """When the process has ended, kills those with the mark, until there are none: they may be
    starting others. One that is starting a program has no environment for a moment, so there are
    none only if three looks find none."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    looks = 0
    while looks < 3:
        pids = marked(mark)
        looks = 0 if pids else looks + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    kill_after(int(sys.argv[1]), sys.argv[2].encode())
