"""Flags by which other training scripts are told of their launch. Here the environment says it."""

from collections.abc import Collection

from utils.errors import UserError
from utils.launch.launchers import LaunchedAs

# Names that launchers and scripts use, with hyphens or underscores. Those in LISTS take any number
# of values.
FLAGS = ("local_rank", "rank", "world_size", "dist_url", "dist_backend", "host", "port", "gpu_ids")
LISTS = ("gpu_ids",)
HOW = "start the processes by NPROC={} bash run_distributed.sh, torchrun, srun or mpirun"


def take_launch_flags(argv: list[str], known: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """(the other flags, {name: value} of FLAGS) of a command line.

    Args:
        known: settings of the entry, which keep their names.

    Raises:
        UserError: a flag has no value.
    """
    left, found, at = [], {}, 0
    while at < len(argv):
        word, equals, value = argv[at].partition("=")
        name = word[2:].replace("-", "_") if word.startswith("--") else ""
        at += 1
        if name not in FLAGS or name in known:
            left.append(argv[at - 1])
            continue
        values = [value] if equals else []
        while at < len(argv) and _is_value(argv[at]) and (name in LISTS or not values):
            values.append(argv[at])
            at += 1
        if not any(values):
            raise UserError(f"{word} needs a value")
        found[name] = ",".join(values)
    return left, found


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
    for name, is_so in (("world_size", size), ("rank", rank)):
        asked = _number(flags, name, is_so)
        if asked not in (-1, is_so):  # -1: many scripts' default, to be read from the environment
            raise UserError(
                f"--{name} {asked}: by the environment this is process {rank} of {size}; "
                + (HOW.format(asked) if name == "world_size" else "set RANK and WORLD_SIZE")
            )
    if place is None and _number(flags, "local_rank", 0) > 0:
        raise UserError(
            f"--local_rank {flags['local_rank']}: the environment has no RANK and WORLD_SIZE, so "
            f"that this process would train alone; {HOW.format('N')}"
        )
    if "gpu_ids" in flags:
        _check_gpus(flags["gpu_ids"], place, visible)
    unused = [f"--{name}" for name in FLAGS if name in flags and name != "local_rank"]
    if not unused:
        return None
    met = f"meet at {place.address}:{place.port}" if place and place.address else "find each other"
    how = f"the processes {met}, as the environment says" if size > 1 else "this process is alone"
    return f"note: {', '.join(unused)}: not used; {how}"


def _check_gpus(text: str, place: LaunchedAs | None, visible: str | None) -> None:
    """Raises UserError unless the GPUs are those that are used: each process takes the one with its
    local rank."""
    ids = [part.strip() for part in text.split(",") if part.strip()]
    sizes = {place.local_world_size, place.world_size} if place else {1}
    counted = ids == [str(number) for number in range(len(ids))] and len(ids) in sizes
    if counted or ids == [part.strip() for part in (visible or "").split(",")]:
        return
    if ids in ([], ["-1"]):
        raise UserError(f"--gpu_ids {text}: --device cpu trains without a GPU")
    chosen = f"CUDA_VISIBLE_DEVICES={','.join(ids)}"
    start = "bash run_distributed.sh ..." if len(ids) > 1 else "python ..."
    raise UserError(f"--gpu_ids {text}: the environment chooses GPUs: {chosen} {start}")


def _number(flags: dict[str, str], name: str, default: int) -> int:
    text = flags.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--{name} {text}: a whole number is needed") from None


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:].isdigit()
