"""Flags of other launchers and scripts. Here the environment says what these flags say there, and
they may only agree with it."""

import argparse
import re
from collections.abc import Collection

from ..errors import UserError
from .launchers import LaunchedAs

# Flags by which other launchers and scripts tell a process its place; spelled with hyphens or
# underscores.
FLAGS = ("local_rank", "rank", "world_size", "dist_url", "dist_backend", "host", "port", "gpu_ids")
START = (
    "start the processes by NPROC={} bash run_distributed.sh, torchrun, srun or mpirun, or set "
    "RANK and WORLD_SIZE in each"
)


def take_launch_flags(argv: list[str], known: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """(the other flags, {name: value} of FLAGS) of a command line.

    Args:
        known: settings of the entry, which keep their names.

    Raises:
        UserError: a flag has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in FLAGS:
        if name not in known:
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    argv = [*argv]
    for at in range(len(argv) - 1, 0, -1):  # `--gpu_ids 0 1` is read as `--gpu_ids 0,1`
        if argv[at - 1] in ("--gpu_ids", "--gpu-ids"):
            while at + 1 < len(argv) and argv[at + 1].replace(",", "").isdigit():
                argv[at] += "," + argv.pop(at + 1)
    try:
        found, left = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{str(error.argument_name).partition('/')[0]} needs a value") from None
    # Without a value: --host=$HOST where that is not set.
    return left, {name: value for name, value in vars(found).items() if value}


def check_launch_flags(
    flags: dict[str, str], place: LaunchedAs | None, visible: str | None
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
    fact = f"by the environment this is process {rank} of {size}"
    for name, actual in (("world_size", size), ("rank", rank)):
        asked = _number(flags, name, actual)
        if asked in (actual, -1):  # -1: many scripts' default, to be read from the environment
            continue
        start = START.format(asked if name == "world_size" else "N")
        way = "remove the flag, as the launcher decides it" if place else start
        raise UserError(f"--{name} {flags[name]}: {fact}; {way}")
    if place is None and _number(flags, "local_rank", 0) not in (0, -1):
        raise UserError(f"--local_rank {flags['local_rank']}: {fact}; {START.format('N')}")
    _check_gpus(_ids(flags.get("gpu_ids", "")), _ids(visible or ""), place)
    unused = [f"--{name}" for name in FLAGS if name in flags and name != "local_rank"]
    if not unused:
        return None
    met = f"meet at {place.address}:{place.port}" if place and place.address else "find each other"
    how = f"the processes {met}, as the environment says" if size > 1 else "this process is alone"
    return f"note: {', '.join(unused)}: not used; {how}"


def _check_gpus(ids: str, visible: str, place: LaunchedAs | None) -> None:
    """Raises UserError unless the GPUs are those that are used: each process takes the one with its
    local rank."""
    sizes = {place.local_world_size, place.world_size} if place else {1}
    used = [",".join(map(str, range(number))) for number in sizes if number]
    if ids == "-1":
        raise UserError("--gpu_ids -1: --device cpu trains without a GPU")
    if ids not in ("", visible, *used):
        start = "bash run_distributed.sh ..." if "," in ids else "python ..."
        raise UserError(
            f"--gpu_ids {ids}: the environment chooses GPUs: CUDA_VISIBLE_DEVICES={ids} {start}"
        )


def _ids(text: str) -> str:
    """ "0, 1," -> "0,1"."""
    return ",".join(part for part in re.split(r"[,\s]+", text) if part)


def _number(flags: dict[str, str], name: str, default: int) -> int:
    try:
        return int(flags.get(name, default))
    except ValueError:
        raise UserError(f"--{name} {flags[name]}: a whole number is needed") from None
