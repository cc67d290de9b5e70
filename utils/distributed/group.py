"""The processes of a run as one group: formed, asked what all agree on, and ended."""

import contextlib
import datetime

import torch
import torch.distributed as dist

from utils.distributed.exchange import ProcessExchange
from utils.launch.environment import LaunchedAs
from utils.launch.watch import Watch

# What a rank hears when another one has gone: the other's own error is the one to read.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out",
        "Timed out", "Socket Timeout", "NCCL", "gloo", "Gloo")  # fmt: skip


def join(place: LaunchedAs, device: torch.device, timeout: float) -> ProcessExchange:
    """Waits for all ranks, and gives what they talk by.

    Args:
        device: of this rank. Tensors on the CPU are exchanged by gloo, those of a GPU by NCCL.
        timeout: seconds that a rank waits for another one.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = datetime.timedelta(seconds=timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
    store.set_timeout(patience)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(place.start, store),  # else old addresses would be found in it
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    return ProcessExchange(local_rank=place.local_rank)


def another(exchange: ProcessExchange, timeout: float) -> ProcessExchange:
    """The same ranks a second time, for a thread that must not get into the first one's way. On
    the CPU alone."""
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
    return ProcessExchange(group, exchange.local_rank)


def leave() -> None:
    """Ends the group; what still hangs in it is given up."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or does not answer."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


class Agreement:
    """What each rank has to say after a step, as all of them know it: the largest of each number.

    Nobody waits for it: a call sends the numbers of this step off and returns those that were
    sent in the call before, which have arrived meanwhile. So all ranks get the same answer in the
    same call.

    Args:
        count: how many numbers.
        watch: told that this rank goes on.
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
