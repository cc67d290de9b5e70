"""The largest micro-batch whose forward and backward pass fit into memory.

On a GPU each size is tried with everything else that training needs allocated: gradients, the
optimizer's state, the average. On a CPU the system kills a process that takes too much, without a
warning; so the bytes that autograd keeps for the backward pass are counted for two small
micro-batches and extrapolated linearly.

Ranks communicate only after each has its answer, so the model is the plain one, before a strategy
wraps it. FSDP, which divides the model, needs less than is found here.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data.loader import Loader
from ..exchange import Exchange
from .memory import succeeds

# Fractions of the memory that are left free: a GPU's becomes fragmented in a long run, a CPU's is
# shared with other programs.
GPU_RESERVE, CPU_RESERVE = 0.05, 0.1
# On a CPU a process grew by 1.0 to 1.4 times what autograd keeps, because of temporaries and a
# fragmented heap, plus up to 0.4 GB of libraries (ResNet-18 and 50, Transformer of 6 layers of 512;
# fp32 and bf16; batches of 16 to 256; freed memory kept). With --fused memory it was up to 3.2
# times: what is recomputed is not counted, and the heap is as fragmented.
CPU_FACTOR, CPU_FACTOR_RECOMPUTED, CPU_ONCE = 1.5, 3.5, 4e8
SMALL, FURTHER = 2, 4  # samples of the smaller micro-batch; how many more the other one has


class Found(NamedTuple):
    """The result for all ranks, which is that of the rank with the least memory."""

    size: int | None  # of a micro-batch, one of the loader's cuts; None: not even the smallest fits
    needed: float  # bytes, for that size or the smallest
    available: float  # bytes, with the reserve


def largest_that_fits(
    model: nn.Module,
    loader: Loader,
    *,
    passes: Callable[..., Iterator[None]],
    build_optimizer: Callable[[], torch.optim.Optimizer],
    averaged: bool,
    available: float,
    exchange: Exchange | None = None,
) -> Found:
    """Cuts the steps of the loader into the largest micro-batches that fit on all ranks.

    A rank's whole step is tried first, as it usually fits. Weights, buffers and random states are
    unchanged afterwards, and there are no gradients.

    Args:
        model: on its device, in the mode in which it trains the most.
        passes: (batch) -> iterator over the passes of a step, each of which frees its memory:
            forward and backward, and those of meta-mixup. Gradients are left in the parameters.
        build_optimizer: makes the run's optimizer, for its state; must not communicate.
        averaged: a moving average of the weights is kept.
        available: bytes of the device that this process may use, including the reserve.
        exchange: with the other ranks, which have the same cuts; None: a single process.
    """
    exchange = exchange or Exchange()
    cuts, needs = loader.cuts(), {}
    first = len(cuts)  # if memory runs out before any size is tried

    def search() -> None:
        nonlocal first
        beside = _beside(model, build_optimizer, averaged)
        probe_class = CPUProbe if next(model.parameters()).device.type == "cpu" else GPUProbe
        probe = probe_class(model, loader, passes, beside, available)

        def fits(index: int) -> bool:
            loader.cut(cuts[index])
            needs[index] = probe.needed(loader.largest())
            return needs[index] <= available

        first = first_that_fits(fits, len(cuts))

    with _unchanged(model):
        succeeds(search)
    needed = needs.get(min(first, len(cuts) - 1), float("inf"))
    # The cuts begin with the largest, so the rank with the least memory has the highest index.
    first, needed, available = max(
        exchange.gather_json([first, needed, available]), key=lambda result: result[0]
    )
    if first == len(cuts):
        return Found(None, needed, available)
    loader.cut(cuts[first])
    return Found(cuts[first], needed, available)


def first_that_fits(fits: Callable[[int], bool], count: int) -> int:
    """The smallest index below `count` for which `fits` is true, or `count` if there is none;
    `fits` must be true from there on. If none fits, the last call is `fits(count - 1)`."""
    return 0 if fits(0) else bisect.bisect_left(range(count), True, lo=1, key=fits)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores weights, buffers and random states at the end, and drops the gradients."""
    device = next(model.parameters()).device
    kept = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(kept[name])
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _beside(model: nn.Module, build_optimizer: Callable, averaged: bool) -> list[Tensor]:
    """What training keeps allocated besides the model and a micro-batch: gradients (which the
    parameters have from here on), the optimizer's state after a step, the average, and the guard's
    copy of the buffers."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer()
    if parameters[0].is_cuda:  # some optimizers copy everything in a step that may be skipped
        optimizer.found_inf = torch.ones((), device=parameters[0].device)
    optimizer.step()
    state = [v for values in optimizer.state.values() for v in values.values()]
    state = [value for value in state if isinstance(value, Tensor)]
    average = [torch.empty_like(tensor) for tensor in parameters] if averaged else []
    buffers = [torch.empty_like(buffer) for buffer in model.buffers()]
    return [p.grad for p in trained] + state + average + buffers


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors; memory that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class GPUProbe:
    """By trial: a micro-batch fits if no allocation fails while the reserve is occupied. `beside`:
    tensors that are allocated meanwhile; the other arguments are as in `largest_that_fits`."""

    def __init__(self, model, loader: Loader, passes: Callable, beside: list, available: float):
        self.loader, self.passes, self.beside = loader, passes, beside
        self.device = device = next(model.parameters()).device
        self.reserve = GPU_RESERVE * available
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - allocated
        room = available - allocated - self.reserve
        # Occupies memory so that it runs out at `available` bytes.
        self.held = torch.empty(max(int(free - room), 0), dtype=torch.uint8, device=device)

    def needed(self, n: int) -> float:
        """Bytes that training takes with micro-batches of n samples, the reserve included;
        infinity where they do not fit."""
        torch.cuda.reset_peak_memory_stats(self.device)
        if not succeeds(lambda: self._try(n)):
            return float("inf")
        return torch.cuda.max_memory_allocated(self.device) - self.held.nbytes + self.reserve

    def _try(self, n: int) -> None:
        ahead = self.loader.trial(n)  # as the next batch, which the loader prepares in training
        for _ in self.passes(self.loader.trial(n)):
            pass
        torch.cuda.synchronize(self.device)
        del ahead


class CPUProbe:
    """By extrapolation from the bytes that the passes keep for two small micro-batches; arguments
    as in GPUProbe."""

    def __init__(self, model, loader: Loader, passes: Callable, beside: list, available: float):
        batch = loader.trial(SMALL)
        # What meta-mixup keeps for its clean samples does not shrink with the micro-batch.
        _, clean_targets = batch.clean or (None, ())
        self.least = max(SMALL, len(clean_targets))
        model.rounds_rows = False  # padding rows would dominate a few short texts (transformer.py)
        try:
            small = kept_by(model, passes, loader.trial(self.least))
            larger = kept_by(model, passes, loader.trial(self.least + FURTHER))
        finally:
            del model.rounds_rows
        # For each pass: (bytes with `least` samples, bytes for each further sample).
        self.bytes_of_passes = [
            (below, (above - below) / FURTHER) for below, above in zip(small, larger, strict=True)
        ]
        self.beside, self.has_clean_samples = _bytes(beside), batch.clean is not None
        recomputes = any(getattr(module, "fused", "none") == "memory" for module in model.modules())
        self.factor = CPU_FACTOR_RECOMPUTED if recomputes else CPU_FACTOR

    def needed(self, n: int) -> float:
        """Bytes that training takes with micro-batches of n samples beyond what the process has
        now, the reserve included."""
        n = max(n, self.least) if self.has_clean_samples else n
        kept = max(base + (n - self.least) * each for base, each in self.bytes_of_passes)
        return (self.beside + self.factor * kept + CPU_ONCE) / (1 - CPU_RESERVE)


def kept_by(model: nn.Module, passes: Callable, batch) -> list[int]:
    """The most bytes that each pass keeps at a time."""
    kept, most = KeptBytes(model), []
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        for _ in passes(batch):
            most.append(kept.most)
            kept.most = 0
    return most


class KeptBytes:
    """Counts the bytes that autograd keeps for the backward pass, shared memory once, without a
    model's own tensors.

    Attributes:
        now: bytes kept at present.
        most: the largest value of `now` since it was set to 0.
    """

    def __init__(self, model: nn.Module):
        self._own = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
        self._users: dict[int, int] = {}  # by address: how many kept tensors use the memory
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> "_Kept":
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._own:
            self._users[place] = self._users.get(place, 0) + 1
            if self._users[place] == 1:
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return _Kept(tensor, self)

    def unpack(self, kept: "_Kept") -> Tensor:
        return kept.tensor

    def drop(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._users:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self.now -= storage.nbytes()


class _Kept:
    """A tensor that autograd keeps; when it is deleted, its memory no longer counts."""

    def __init__(self, tensor: Tensor, counter: KeptBytes):
        self.tensor, self.counter = tensor, counter

    def __del__(self):
        self.counter.drop(self.tensor)
