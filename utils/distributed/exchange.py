"""The real `Exchange`: collectives of torch.distributed."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..exchange import Exchange, Rows
from . import ordered_sum
from .ordered_sum import Message, Step

# In seconds, between two looks of a rank that waits for a cache at whether it is there.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
TELLS_S = 2.0  # in which a rank that has failed says why; once another one ends, it may be killed
TURNS = itertools.count()  # calls of `in_turn` in this process; names their keys in the store


def default_exchange() -> Exchange:
    """That of the default process group, or of a process alone. Raises RuntimeError if the
    environment names other processes, and there is no group."""
    if dist.is_initialized():
        return ProcessExchange()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise RuntimeError("several processes: call torch.distributed.init_process_group() first")
    return Exchange()


class ProcessExchange(Exchange):
    """One rank's exchange with the others of a process group.

    Args:
        group: a process group; None: the default one.
        local_rank: among the ranks on this machine.
    """

    def __init__(self, group=None, local_rank: int = 0):
        self.group, self.local_rank = group, local_rank
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._rows: dict[int, Rows] = {}  # by id of the parameter; sharded ones only
        self._node_size: int | None = None  # known once it is needed

    def __deepcopy__(self, memo) -> "ProcessExchange":
        return self  # a copied module uses the same group

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def mean(self, tensor: Tensor) -> Tensor:
        return self.sum(tensor) / self.size

    def sum_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        if self._node_size is None:
            self._node_size = ordered_sum.node_size(self.gather_json(self.local_rank))
            # NCCL wants all ranks in its first call, and a chain begins with two nodes.
            self.sum(rows.new_zeros(1))
        by = self._by_gloo if rows.device.type == "cpu" else self._by_nccl
        return ordered_sum.sum_rows(rows, counts, self.rank, self._node_size, by)

    def _by_nccl(self, steps: list[Step]) -> None:
        # It does one batch after the other, and both sides must be in the same one.
        for step in steps:
            self._wait(self._start(step.sent, step.received))
            if step.then is not None:
                step.then()

    def _by_gloo(self, steps: list[Step]) -> None:
        # It sends nothing before the other side has said that it is ready to receive, which takes
        # long over a slow link: so it says so for all steps at once. A chunk of the sum comes back
        # into the memory that it was sent from, and so not before it has left.
        received = [self._start([], step.received) for step in steps]
        late: list[dist.Work] = []
        for step, works in zip(steps, received, strict=True):
            sent = self._start(step.sent, [])
            if step.then is None:
                late += works
            else:
                self._wait(works)
                step.then()
            self._wait(sent)
        self._wait(late)

    def _start(self, sent: list[Message], received: list[Message]) -> list[dist.Work]:
        """Empty tensors are left out."""
        operations = [
            dist.P2POp(function, tensor, group=self.group, group_peer=other)
            for function, messages in ((dist.isend, sent), (dist.irecv, received))
            for tensor, other in messages
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _wait(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor.contiguous(), group=self.group)
        return tensors

    def gather_json(self, value: Any) -> list:
        text = json.dumps(value).encode()  # raises TypeError before any rank waits
        # On the CPU, by gloo: so nothing waits for the GPU.
        lengths = [int(length) for length in self.gather(torch.tensor([len(text)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = zip(self.gather(padded), lengths, strict=True)
        return [json.loads(received.numpy()[:length].tobytes()) for received, length in texts]

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1), group=self.group)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        # By the store: collectives have a timeout.
        store, name = dist.distributed_c10d._get_default_store(), f"turn/{next(TURNS)}"
        turn = 0 if self.rank == 0 else 1 if self.local_rank == 0 else 2
        firsts = [local == 0 for local in self.gather_json(self.local_rank)]
        members = [1, sum(firsts[1:]), firsts.count(False)]
        for before in range(turn):
            if members[before]:
                _wait_for(store, f"{name}/{before}/{members[before]}", f"{name}/failed")
        try:
            yield
        except Exception:  # not a signal, which stops all ranks
            with contextlib.suppress(RuntimeError):  # rank 0, which has the store, is gone
                store.set(f"{name}/failed", str(self.rank))
            raise
        # The last rank of a turn opens the next one.
        done = store.add(f"{name}/{turn}", 1)
        store.set(f"{name}/{turn}/{done}", "")
        for other in range(turn, 3):  # nobody continues before all are done
            if members[other]:
                _wait_for(store, f"{name}/{other}/{members[other]}", f"{name}/failed")

    # ---- sharded parameters -------------------------------------------------------------------

    def divide(self, parameter: Tensor, rows: Rows) -> None:
        """Registers `parameter` as these rows of a larger one. All ranks but the last have equally
        many rows, as torch.chunk cuts them."""
        self._rows[id(parameter)] = rows

    def rows(self, parameter: Tensor) -> Rows | None:
        return self._rows.get(id(parameter))

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        rows = self.rows(parameter)
        if rows is None:
            return tensor
        length = rows.shape[0]
        most = -(-length // self.size)
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        whole = tensor.new_empty(self.size * most, *tensor.shape[1:])
        # PyTorch 2.14 has a new name for it, and warns of the old one.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(whole, padded, group=self.group)
        return whole[:length]


def _wait_for(store: dist.Store, key: str, failed: str) -> None:
    """Waits for a key of the store, for as long as it takes. Raises UserError once a rank has set
    `failed`. Not by `store.wait`: it has a timeout, and a signal has no effect before its end."""
    pause = SHORTEST_PAUSE
    while not store.check([key]):
        if store.check([failed]):
            rank = store.get(failed).decode()
            time.sleep(TELLS_S)
            raise UserError(f"process {rank} has failed, and its last lines say why")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
