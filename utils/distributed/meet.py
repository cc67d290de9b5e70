"""What the processes of a run tell each other: that they are one run, on the same data."""

import dataclasses
import socket
from collections.abc import Mapping

import torch

from utils.distributed.exchange import ProcessExchange
from utils.errors import UserError
from utils.exchange import Exchange
from utils.launch.launchers import TORCHRUN, LaunchedAs
from utils.settings.yaml_file import PLACES

# What may depend on the machine: where files are, and how many cores are used. The contents of
# files are compared: recipes by the settings in them, data by `agree_on_data`.
MAY_DIFFER = {*PLACES, "config", "host_config", "workers", "threads"} - {"output"}


def meet(
    exchange: ProcessExchange, place: LaunchedAs, device: torch.device, settings: Mapping
) -> LaunchedAs:
    """`place`, with its numbers on this machine, which torchrun knows, and other launchers may not.
    Collective.

    Raises:
        UserError: the processes have different settings, so that they are not meant to be one run,
            or two share a GPU.
    """
    numbered = place.by == TORCHRUN
    gpu = None
    if device.type == "cuda" and not numbered:
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    own = {name: str(value) for name, value in settings.items() if name not in MAY_DIFFER}
    if numbered or settings.get("host_config"):  # one folder, whose path may depend on the machine
        own.pop("output", None)
    if "resume" in own:  # the folder likewise; the steps of the checkpoints are compared later
        own["resume"] = "a run" if settings["resume"] is not None else "none"
    told = exchange.gather_json([socket.gethostname(), gpu, own])
    first = told[0][2]
    for rank, (host, used, theirs) in enumerate(told):
        # With other versions of the code there may be other settings.
        both = first.keys() & theirs.keys()
        name = next((name for name in first if name in both and theirs[name] != first[name]), None)
        if name is not None:
            raise UserError(
                f"--{name}: rank 0 has {first[name]}, rank {rank} has {theirs[name]}, and the "
                f"processes of a run need the same settings; with --no_distributed each process "
                "trains a run of its own"
            )
        same_gpu = next((r for r in range(rank) if used and told[r][:2] == [host, used]), None)
        if same_gpu is not None:
            raise UserError(
                f"ranks {same_gpu} and {rank} use the same GPU of {host}: start a process for each "
                "GPU, and set LOCAL_RANK, or srun --gpus-per-task=1"
            )
    if numbered:
        return place
    here = [rank for rank, (host, *_) in enumerate(told) if host == told[place.rank][0]]
    exchange.local_rank = here.index(place.rank)
    return dataclasses.replace(place, local_rank=exchange.local_rank, local_world_size=len(here))


def agree_on_data(exchange: Exchange, fingerprint: str, flags: str) -> None:
    """Raises UserError if the ranks have loaded different data: each would take its part of an
    order of its own. Collective.

    Args:
        flags: those that say where the data are.
    """
    told = exchange.gather_json([socket.gethostname(), fingerprint])
    for rank, (host, theirs) in enumerate(told):
        if theirs != told[0][1]:
            raise UserError(
                f"{flags}: the data of rank {rank} (on {host}) are not those of rank 0 (on "
                f"{told[0][0]}); all processes need the same files"
            )
