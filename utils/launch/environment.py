"""What a worker knows of the launch that it belongs to: torchrun's environment variables, and the
folder that the launcher shares with the workers of its machine (LAUNCH_FOLDER).

Nothing here imports PyTorch: a worker asks before it does anything else.
"""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

LAUNCH_FOLDER = "LAUNCH_FOLDER"  # set by the launcher; a fresh temporary folder of each launch
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class LaunchedAs:
    """This process among those that train together.

    Attributes:
        rank, world_size: among all of them.
        local_rank, local_world_size: among those of this machine.
        restarts: how often the launcher has started them again after a failure.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int

    @property
    def start(self) -> str:
        """Name of this start of all processes, the same on each. On one machine torchrun's store
        lives on from one start to the next, with all that the dead processes have left in it; on
        several, whose numbers of restarts may differ, every start has a new one."""
        one_machine = self.local_world_size == self.world_size
        return f"start-{self.restarts}" if one_machine else "start"


def launched() -> LaunchedAs | None:
    """None in a process that torchrun has not started."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    if any(name not in os.environ for name in names):
        return None
    return LaunchedAs(*(int(os.environ[name]) for name in names))


def previous_exit_code() -> int | None:
    """The code with which a worker of this launch has ended for good; the others, and those that
    are started again, end with it too."""
    path = _exit_code_file()
    if path is None:
        return None
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):  # an empty file: it is being written
        return None


def note_exit_code(code: int) -> bool:
    """Ends the launch for good with this code instead of a restart. Whether this process is the
    first to do so, which is the one that tells the user why; True outside of a launch."""
    path = _exit_code_file()
    if path is None:
        return True
    try:
        with path.open("x") as file:
            file.write(str(code))
    except OSError:  # another one was first, or the launcher is gone
        return False
    return True


def die_with_launcher() -> None:
    """From now on this process is killed when the launcher dies without a word, as by SIGKILL:
    nobody else would end it. Linux only; does nothing outside of a launch."""
    if LAUNCH_FOLDER in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_code_file() -> Path | None:
    folder = os.environ.get(LAUNCH_FOLDER)
    return Path(folder) / "exit_code" if folder else None
