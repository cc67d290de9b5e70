"""What the environment tells a worker of its launch: its place among all; the folder that the
launcher shares with the workers on its machine (LAUNCH_FOLDER); and the run's folder, in which a
worker that is started again finds the run (LAUNCH_RUN).

Nothing here imports PyTorch: a worker needs this before anything else.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from .launchers import TORCHRUN, LaunchedAs, read_launch, without_launch
from .network import choose_interface, is_loopback, local_address

LAUNCH_FOLDER = "LAUNCH_FOLDER"  # set by the launcher to a new temporary folder
LAUNCH_RUN = "LAUNCH_RUN"  # set by the launcher to the run's folder if the job trains
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def launched() -> LaunchedAs | None:
    """None in a process that no launcher has started.

    Raises:
        UserError: see read_launch.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    if any(name not in os.environ for name in names):
        place = read_launch(os.environ)
        return place if place and place.world_size > 1 else None
    rank, size, local_rank, local_size, restarts = (int(os.environ[name]) for name in names)
    return LaunchedAs(rank, size, local_rank, local_size, restarts)


def set_environment(place: LaunchedAs) -> None:
    """Sets what PyTorch reads, as torchrun does, where another launcher has started this process,
    and the network interface, which torchrun does not choose; to be called before PyTorch is
    imported."""
    if place.by == TORCHRUN:
        if place.world_size != place.local_world_size and "MASTER_ADDR" in os.environ:
            address = local_address(os.environ["MASTER_ADDR"], 0)
            if not is_loopback(address):  # node 0 may have been given localhost
                choose_interface(address)
        return
    own: dict = {"RANK": place.rank, "WORLD_SIZE": place.world_size, "LOCAL_RANK": place.local_rank}
    own |= {"MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    os.environ.update({name: str(value) for name, value in own.items() if value is not None})
    # Each of PyTorch's C++ warnings about a closed connection fills a screen.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    assert place.address is not None and place.port is not None
    choose_interface(local_address(place.address, place.port))


def command_start() -> float:
    """`time.monotonic()` when the command of this process began: its launcher, if that has not
    restarted it since. Linux; elsewhere it is now."""
    place = launched()
    is_first = LAUNCH_FOLDER in os.environ and place is not None and not place.restarts
    process = os.getppid() if is_first else os.getpid()
    now = time.monotonic()
    try:
        # proc(5): field 22, starttime, in ticks since the machine began; 2 is in parentheses.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return now


def leave_launch() -> None:
    """From now on this process is alone."""
    for name in {*os.environ} - {*without_launch(os.environ)}:
        del os.environ[name]


def previous_exit_code() -> int | None:
    """The exit code with which a worker has ended this launch for good, if one has; all other
    workers, restarted ones too, then end with it."""
    path = _exit_code_file()
    if path is None:
        return None
    try:
        return int(os.readlink(path))
    except OSError:
        return None


def note_exit_code(code: int) -> bool:
    """Makes the launch end with this code, without a restart. Returns whether this process is the
    first to do so, and so the one that tells the user why; True outside of a launch."""
    path = _exit_code_file()
    if path is None:
        return True
    try:
        os.symlink(str(code), path)  # at once whole, and possible on a disk that is full
    except FileExistsError:
        return False
    except OSError:  # the folder is gone: rather two processes say why than none
        return True
    return True


def die_with_launcher() -> None:
    """From now on the kernel kills this process when the launcher dies (of SIGKILL, say), since
    nobody else would. Linux only; does nothing outside of a launch."""
    if LAUNCH_FOLDER in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_code_file() -> Path | None:
    folder = os.environ.get(LAUNCH_FOLDER)
    return Path(folder) / "exit_code" if folder else None
