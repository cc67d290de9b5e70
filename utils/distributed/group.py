"""The process group of a run: how a process joins it, checks that all are one run on the same data,
agrees with the others, and leaves."""

import contextlib
import dataclasses
import datetime
import socket
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..errors import UserError
from ..exchange import Exchange
from ..launch.launchers import TORCHRUN, LaunchedAs
from ..launch.watch import Watch
from ..settings.yaml_file import PLACES
from .exchange import ProcessExchange

POLL_SECONDS = 0.2
# Parts of the errors of a rank whose peer is gone. The peer's own error is the one to read.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out",
        "Timed out", "Socket Timeout", "NCCL", "gloo", "Gloo")  # fmt: skip
# What may depend on the machine: where files are, and how many cores are used. The contents of
# files are compared: recipes by the settings in them, data by `agree_on_data`.
MAY_DIFFER = {*PLACES, "config", "host_config", "workers", "threads"} - {"output"}


def join(place: LaunchedAs, device: torch.device, timeout: float) -> ProcessExchange:
    """Waits for all ranks; returns the exchange with them.

    Args:
        device: of this rank. Gloo exchanges tensors on the CPU, NCCL those on a GPU.
        timeout: seconds for which a rank waits for another one.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = datetime.timedelta(seconds=timeout)
    if place.by == TORCHRUN:
        store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    else:
        store = _meeting_place(place, patience)
    store.set_timeout(patience)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(place.start, store),  # without addresses of earlier starts
        rank=place.rank,
        world_size=place.world_size,
        timeout=patience,
    )
    return ProcessExchange(local_rank=place.local_rank)  # type: ignore[arg-type]  # until `meet`


def _meeting_place(place: LaunchedAs, patience: datetime.timedelta) -> dist.Store:
    """The store of rank 0, once all ranks have come. Waits in Python, where signals are handled.

    Raises:
        UserError: the ranks do not meet.
    """
    end, where = time.monotonic() + patience.total_seconds(), f"{place.address}:{place.port}"
    while place.rank > 0:
        try:
            socket.create_connection((place.address, place.port), timeout=POLL_SECONDS).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise UserError(
                    f"rank {place.rank} does not reach rank 0 at {where}: was it started, is that "
                    "its machine, and is the port open? MASTER_ADDR and MASTER_PORT set another one"
                ) from None
        time.sleep(POLL_SECONDS)
    try:
        store = dist.TCPStore(
            *(place.address, place.port, place.world_size),
            is_master=place.rank == 0,
            timeout=patience,
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        raise UserError(
            f"rank {place.rank} cannot use {where} ({str(error).splitlines()[0]}): set another "
            "MASTER_PORT, the same for all"
        ) from None
    store.add("joined", 1)
    while (joined := store.add("joined", 0)) < place.world_size:
        if time.monotonic() > end:
            raise UserError(
                f"only {joined} of {place.world_size} processes have come to {where}: were all "
                "started, with the same MASTER_ADDR and MASTER_PORT?"
            )
        time.sleep(POLL_SECONDS)
    return store


def meet(
    exchange: ProcessExchange, place: LaunchedAs, device: torch.device, settings: Mapping
) -> LaunchedAs:
    """Checks that the processes are one run. Returns `place` with its numbers on this machine,
    which torchrun states and other launchers may not. Collective.

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


def another(exchange: ProcessExchange, timeout: float) -> ProcessExchange:
    """A second exchange between the same ranks, for a thread whose collectives must not mix with
    the others; for tensors on the CPU only."""
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
    return ProcessExchange(group, exchange.local_rank)


def leave() -> None:
    """Destroys the group; collectives that still hang are abandoned."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or silent."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


class Agreement:
    """The maximum over the ranks of each of a few numbers.

    Each call sends this rank's numbers and returns the maxima of the previous call (zeros in the
    first), which have usually arrived meanwhile, so that ranks hardly wait. Every rank must call it
    equally often; then all get the same answer in the same call.

    Args:
        watch: notified that this rank makes progress.
    """

    def __init__(self, exchange: ProcessExchange, watch: Watch | None = None):
        self.exchange, self.watch = exchange, watch
        self._sent: tuple[torch.Tensor, dist.Work] | None = None

    def __call__(self, *numbers: int) -> list[int]:
        if self.watch is not None:
            self.watch.beat()
        agreed = [0] * len(numbers)
        if self._sent is not None:
            tensor, work = self._sent
            work.wait()
            agreed = tensor.tolist()
        tensor = torch.tensor(numbers, dtype=torch.int32)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.exchange.group, async_op=True)
        self._sent = tensor, work
        return agreed
