"""Counts the collective calls of a training run, and the bytes that they send."""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.common import silent
from benchmarks.loop import take_steps

BUCKET = "all_reduce, a bucket of the gradient"
# Function of torch.distributed -> (its name here, position of the input tensor). Two of them have
# other names in other releases of PyTorch.
KINDS = {
    "all_reduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
}
MESSAGES = "batch_isend_irecv"  # between pairs of ranks


class Collectives:
    """A context in which the calls of this process are counted.

    Attributes:
        calls: (name, bytes of this rank's input) -> number of calls. "send": a message to a rank.
    """

    def __init__(self):
        self.calls: Counter[tuple[str, int]] = Counter()
        self._inside = False  # a function of torch.distributed may call another

    def __enter__(self) -> "Collectives":
        names = [*KINDS, MESSAGES]
        self._before = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
        for name, function in self._before.items():
            if name == MESSAGES:
                counting = self._counting_messages(function)
            else:
                counting = self._counting(function, *KINDS[name])
            setattr(dist, name, counting)
        return self

    def __exit__(self, *error) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def hook(self, strategy) -> None:
        """Counts DDP's own reductions, which do not pass through Python otherwise."""
        if hasattr(strategy.called, "register_comm_hook"):
            strategy.called.register_comm_hook(strategy.exchange.group, self._reduce)

    def _reduce(self, group, bucket):
        self.calls[BUCKET, bucket.buffer().nbytes] += 1
        with self._uncounted():
            return allreduce_hook(group, bucket)

    def _counting(self, function, kind: str, place: int):
        def counted(*args, **options):
            if not self._inside:
                names = "tensor", "input", "input_tensor"
                named = [options[name] for name in names if name in options]
                length = (args[place] if len(args) > place else named[0]).nbytes
                self.calls[kind, length] += 1
            with self._uncounted():
                return function(*args, **options)

        return counted

    def _counting_messages(self, function):
        def counted(operations):
            for operation in operations:
                if operation.op is dist.isend:
                    self.calls["send", operation.tensor.nbytes] += 1
            return function(operations)

        return counted

    @contextlib.contextmanager
    def _uncounted(self):
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before


def sent(kind: str, length: int, ranks: int) -> float:
    """Bytes that a rank sends by the ring algorithm, when the input of each is `length` bytes."""
    share = (ranks - 1) / ranks
    if kind.startswith("all_reduce"):
        return 2 * share * length
    if kind.startswith("all_gather"):
        return (ranks - 1) * length
    return share * length if kind == "reduce_scatter" else length


def per_step(few: Counter, many: Counter, steps: int) -> dict[tuple[str, int], float]:
    """Calls of a step, from two runs that differ by `steps` steps: calls at the start and the end
    of a run cancel."""
    calls = {key: (many[key] - few[key]) / steps for key in many}
    return {key: calls[key] for key in sorted(calls, key=lambda k: (k[0], -k[1])) if calls[key]}


def total_sent(calls: dict[tuple[str, int], float], ranks: int) -> float:
    return math.fsum(number * sent(*key, ranks) for key, number in calls.items())


def calls_of_runs(trainer, runs: Sequence[int]) -> list:
    """The calls of collectives in each of these runs, of so many steps, on this rank."""
    counted, hooked = [], Collectives()
    hooked.hook(trainer.steps.strategy)
    with hooked, silent():
        for steps in runs:
            hooked.calls.clear()
            take_steps(trainer, steps)
            counted.append(hooked.calls.copy())
    return counted
