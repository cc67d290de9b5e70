"""The process group of a run: joined, agreed with, left."""

import contextlib
import datetime

import torch
import torch.distributed as dist

from utils.distributed.exchange import ProcessExchange
from utils.errors import UserError
from utils.launch.launchers import TORCHRUN, LaunchedAs
from utils.launch.watch import Watch

# Parts of the errors of a rank whose peer is gone. The peer's own error is the one to read.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out",
        "Timed out", "Socket Timeout", "NCCL", "gloo", "Gloo")  # fmt: skip


def join(place: LaunchedAs, device: torch.device, timeout: float) -> ProcessExchange:
    """Waits for all ranks; returns the exchange with them.

    Args:
        device: of this rank. Gloo exchanges tensors on the CPU, NCCL those on a GPU.
        timeout: seconds for which a rank waits for another one.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = datetime.timedelta(seconds=timeout)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if place.by == TORCHRUN:
            raise
        raise UserError(_why_not_met(place, str(error), timeout)) from None
    store.set_timeout(patience)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(place.start, store),  # without addresses of earlier starts
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    return ProcessExchange(local_rank=place.local_rank)


def _why_not_met(place: LaunchedAs, error: str, timeout: float) -> str:
    where = f"{place.address}:{place.port}"
    if "EADDRINUSE" in error or "already in use" in error:
        return (
            f"MASTER_PORT={place.port} is in use on {place.address}: set another, the same for all"
        )
    if place.rank == 0:
        return (
            f"rank 0 has waited at {where} for {timeout / 60:.2g} minutes, and not all of "
            f"{place.world_size} processes have come: were they all started, with this MASTER_ADDR?"
        )
    return (
        f"rank {place.rank} does not reach rank 0 at {where}: was it started, is that its machine, "
        "and is the port open? MASTER_ADDR and MASTER_PORT set another one"
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
        count: how many numbers.
        watch: notified that this rank makes progress.
    """

    def __init__(self, exchange: ProcessExchange, count: int, watch: Watch | None = None):
        self.exchange, self.count, self.watch = exchange, count, watch
        self._sent = None

    def __call__(self, *numbers: int) -> list[int]:
        if self.watch is not None:
            self.watch.beat()
        agreed = [0] * self.count
        if self._sent is not None:
            tensor, work = self._sent
            work.wait()
            agreed = tensor.tolist()
        tensor = torch.tensor(numbers, dtype=torch.int32)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.exchange.group, async_op=True)
        self._sent = tensor, work
        return agreed
