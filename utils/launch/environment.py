"""What a worker knows of its launch: torchrun's environment variables, and the folder that the
launcher shares with the workers on its machine (LAUNCH_FOLDER).

Nothing here imports PyTorch: a worker needs this before anything else.
"""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

LAUNCH_FOLDER = "LAUNCH_FOLDER"  # set by the launcher to a new temporary folder
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class LaunchedAs:
    """The place of this process among those that train together.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those on this machine.
        restarts: how often the launcher has restarted them after a failure.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int

    @property
    def start(self) -> str:
        """Name of the current start of all processes, the same on each. On one machine torchrun's
        store survives a restart, with the keys that dead processes left in it, so the name has the
        number of restarts. On several machines, where these numbers may differ, every start has a
        new store."""
        one_machine = self.local_world_size == self.world_size
        return f"start-{self.restarts}" if one_machine else "start"


def launched() -> LaunchedAs | None:
    """None in a process that torchrun has not started."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    if any(name not in os.environ for name in names):
        return None
    return LaunchedAs(*(int(os.environ[name]) for name in names))


def previous_exit_code() -> int | None:
    """The exit code with which a worker has ended this launch for good, if one has; all other
    workers, restarted ones too, then end with it."""
    path = _exit_code_file()
    if path is None:
        return None
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):  # an empty file: it is being written
        return None


def note_exit_code(code: int) -> bool:
    """Makes the launch end with this code, without a restart. Returns whether this process is the
    first to do so, and so the one that tells the user why; True outside of a launch."""
    path = _exit_code_file()
    if path is None:
        return True
    try:
        with path.open("x") as file:
            file.write(str(code))
    except OSError:  # another process was first, or the launcher is gone
        return False
    return True


def die_with_launcher() -> None:
    """From now on the kernel kills this process when the launcher dies (of SIGKILL, say), since
    nobody else would. Linux only; does nothing outside of a launch."""
    if LAUNCH_FOLDER in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_code_file() -> Path | None:
    folder = os.environ.get(LAUNCH_FOLDER)
    return Path(folder) / "exit_code" if folder else None
