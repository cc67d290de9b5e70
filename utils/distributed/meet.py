"""What processes that torchrun has not started tell each other once they have joined."""

import dataclasses
import socket
from collections.abc import Mapping

import torch

from utils.distributed.exchange import ProcessExchange
from utils.errors import UserError
from utils.launch.environment import LaunchedAs
from utils.settings.hosts import PLACES

MAY_DIFFER = ("data_dir", "cache_dir")  # a machine's own disk


def meet(
    exchange: ProcessExchange, place: LaunchedAs, device: torch.device, settings: Mapping
) -> LaunchedAs:
    """`place`, with its numbers on this machine by the machines' names. Collective.

    Raises:
        UserError: the processes have different settings, so that they are not meant to be one run,
            or two share a GPU.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    may_differ = PLACES if settings.get("host_config") else MAY_DIFFER
    own = {name: str(value) for name, value in settings.items() if name not in may_differ}
    told = exchange.gather_json([socket.gethostname(), gpu, own])
    for rank, (host, used, theirs) in enumerate(told):
        name = next((name for name in own if theirs[name] != told[0][2][name]), None)
        if name is not None:
            raise UserError(
                f"--{name}: rank 0 has {told[0][2][name]}, rank {rank} has {theirs[name]}, and the "
                f"processes of a run need the same settings; with --no_distributed each process "
                "trains a run of its own"
            )
        same_gpu = next((r for r in range(rank) if used and told[r][:2] == [host, used]), None)
        if same_gpu is not None:
            raise UserError(
                f"ranks {same_gpu} and {rank} use the same GPU of {host}: start a process for each "
                "GPU, and set LOCAL_RANK, or srun --gpus-per-task=1"
            )
    here = [rank for rank, (host, *_) in enumerate(told) if host == told[place.rank][0]]
    exchange.local_rank = here.index(place.rank)
    return dataclasses.replace(place, local_rank=exchange.local_rank, local_world_size=len(here))
