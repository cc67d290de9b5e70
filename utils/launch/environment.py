"""What a worker knows of its launch: its place among all, from environment variables, and what
flags of other scripts say of it; the folder that the launcher shares with the workers on its
machine (LAUNCH_FOLDER); and the run's folder, in which a worker that is started again finds the run
(LAUNCH_RUN).

Nothing here imports PyTorch: a worker needs this before anything else.
"""

import argparse
import ctypes
import os
import re
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from utils.errors import UserError
from utils.launch.launchers import TORCHRUN, LaunchedAs, read_launch, without_launch
from utils.launch.network import choose_interface, is_loopback, local_address

LAUNCH_FOLDER = "LAUNCH_FOLDER"  # set by the launcher to a new temporary folder
LAUNCH_RUN = "LAUNCH_RUN"  # set by the launcher to the run's folder if the job trains
# By these, launchers and scripts tell processes of their launch, with hyphens or underscores.
FLAGS = ("local_rank", "rank", "world_size", "dist_url", "dist_backend", "host", "port", "gpu_ids")
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


# ---- flags of other scripts, where the environment says it here ----------------------------------


def take_launch_flags(
    argv: list[str], known: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """(the other flags, {name: values} of FLAGS) of a command line.

    Args:
        known: settings of the entry, which keep their names.

    Raises:
        UserError: a flag has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in FLAGS:
        if name not in known:
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs=1)
    argv = [*argv]
    for at in range(len(argv) - 1, 0, -1):  # ids in words of their own are joined with the first
        if argv[at - 1] in ("--gpu_ids", "--gpu-ids"):
            while at + 1 < len(argv) and argv[at + 1].replace(",", "").isdigit():
                argv[at] += "," + argv.pop(at + 1)
    try:
        found, left = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{str(error.argument_name).partition('/')[0]} needs a value") from None
    # Without a value: --host=$HOST where that is not set.
    return left, {name: values for name, values in vars(found).items() if values and any(values)}


def check_launch_flags(
    flags: dict[str, list[str]], place: LaunchedAs | None, visible: str | None
) -> str | None:
    """A line that says which flags are not used; --local_rank, which launchers add, is not told of.

    Args:
        flags: from take_launch_flags.
        place: of this process; None: it is alone.
        visible: CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: a flag says something else than the environment does.
    """
    rank, size = (place.rank, place.world_size) if place else (0, 1)
    for name, is_so in {"world_size": size, "rank": rank, "local_rank": rank}.items():
        (asked,) = flags.get(name, [str(is_so)])
        # -1: many scripts' default, to be read from the environment.
        if asked in (str(is_so), "-1") or (name == "local_rank" and place):
            continue
        number = asked if name == "world_size" else "N"
        raise UserError(
            f"--{name} {asked}: by the environment this is process {rank} of {size}; start the "
            f"processes by NPROC={number} bash run_distributed.sh, torchrun, srun or mpirun, or "
            "set RANK and WORLD_SIZE in each"
        )
    ids, visible = (
        ",".join(part for part in re.split(r"[,\s]+", text) if part)
        for text in (*flags.get("gpu_ids", [""]), visible or "")
    )
    # Each process takes the GPU with its local rank.
    sizes = {place.local_world_size, place.world_size} if place else {1}
    used = [",".join(map(str, range(number))) for number in sizes if number]
    if ids == "-1":
        raise UserError("--gpu_ids -1: --device cpu trains without a GPU")
    if ids not in ("", visible, *used):
        start = "bash run_distributed.sh ..." if "," in ids else "python ..."
        raise UserError(
            f"--gpu_ids {ids}: the environment chooses GPUs: CUDA_VISIBLE_DEVICES={ids} {start}"
        )
    unused = [f"--{name}" for name in FLAGS if name in flags and name != "local_rank"]
    if not unused:
        return None
    met = f"meet at {place.address}:{place.port}" if place and place.address else "find each other"
    how = f"the processes {met}, as the environment says" if size > 1 else "this process is alone"
    return f"note: {', '.join(unused)}: not used; {how}"
