"""Flags of other launchers and scripts. Where a launcher has started this process, the environment
says what these flags say there, and they may only agree with it; elsewhere they set it."""

import argparse
import os
import re
import sys
from collections.abc import Collection, Iterator

from ..errors import UserError
from ..place import launcher_command
from .environment import launched
from .launchers import LaunchedAs

# Flags by which other launchers and scripts tell a process its place; spelled with hyphens or
# underscores.
FLAGS = ("local_rank", "rank", "world_size", "dist_url", "dist_backend", "host", "port", "gpu_ids")
START = (
    "start the processes by NPROC={} bash run_distributed.sh, torchrun, srun or mpirun, or give "
    "--world_size, --rank and --dist_url tcp://HOST:PORT to each"
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


def use_launch_flags(flags: dict[str, str], argv: list[str]) -> None:
    """In a process that no launcher has started sets the environment variables that flags stand
    for, and takes these out of `flags`; where --gpu_ids names several GPUs for one process,
    replaces it by run_distributed.sh, which starts one on each. `argv`: the script's own flags.
    Raises UserError for a value that is no such variable's."""
    if launched() is not None:
        return
    gpus = _ids(flags.get("gpu_ids", ""))
    for names, variables in _variables(flags, gpus):
        os.environ.update({name: value for name, value in variables.items() if value})
        for name in names:
            flags.pop(name, None)
    visible = _ids(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if "," in gpus and visible in ("", gpus) and launched() is None:
        print(f"note: --gpu_ids {gpus}: run_distributed.sh starts a process on each", flush=True)
        os.environ.update(NPROC=str(gpus.count(",") + 1), PYTHON=sys.executable)
        launcher = launcher_command()
        os.execvp(launcher[0], [*launcher, os.path.abspath(sys.argv[0]), *argv])


def _variables(flags: dict[str, str], gpus: str) -> Iterator[tuple[list[str], dict]]:
    """(flags, the variables that they stand for): the GPUs of the process, unless the environment
    says them; its rank and where rank 0 waits for the others, if the flags say all of that."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ and gpus not in ("", "-1"):
        if not re.fullmatch(r"\d+(,\d+)*", gpus):
            raise UserError(f"--gpu_ids {gpus}: numbers of GPUs are needed, as in 0,1")
        yield ["gpu_ids"], {"CUDA_VISIBLE_DEVICES": gpus}
    url, host, port = flags.get("dist_url", "env://"), flags.get("host"), flags.get("port")
    if url != "env://":
        match = re.fullmatch(r"tcp://\[?([\w.-]+|[0-9a-fA-F:]+)\]?:(\d+)/?", url)
        if not match:
            raise UserError(f"--dist_url {url}: tcp://HOST:PORT is needed, the address of rank 0")
        host, port = match.groups()
    rank, size = _number(flags, "rank", -1), _number(flags, "world_size", 1)
    if host and rank >= 0 and size > 1:
        local = flags.get("local_rank", "").removeprefix("-1")
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": local}
        place |= {"MASTER_ADDR": host, "MASTER_PORT": port or ""}
        yield ["rank", "world_size", "dist_url", "host", "port", "local_rank"], place


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
