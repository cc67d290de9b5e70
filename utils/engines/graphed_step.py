"""Runs a whole optimizer step as one CUDA graph, captured once and replayed.

Augmentation, forward, backward, clipping, optimizer, guard and average are launched at once instead
of kernel by kernel. As PyTorch's notes on CUDA graphs require, steps before the capture run on a
side stream, batches are copied into static tensors, gradients are allocated within the graph, and
the graph has its own memory pool. What the host decides for each step (learning rate, step number,
weight of the average) is written into tensors before a replay. Dropout draws from PyTorch's
generator, which `torch.cuda.graph` registers with the graph. If the pictures are on the device, a
batch holds their indices and the augmentation's choices; otherwise, and where the host must group
the samples (`later` of PictureLoader), the loader has augmented them.

Every batch of texts has another number of tokens. So the loader gives each of them fillers, texts
that the model leaves out of what it returns, up to the next of a few sizes, and each size has a
graph. Losses, metrics and gradients are those of the other texts, up to the order of sums; only
dropout draws other random numbers, since it has more rows.

A batch of another size, such as the last one of an epoch, takes an ordinary step, and so does one
with clean samples, from which meta-mixup learns. Nothing else can use the graph's memory, so the
memory of a step is needed twice; if there is too little, graphs are not used.

By default the first few steps are ordinary ones that are timed, and graphs are captured only if
steps are launch-bound (see launch_bound.py): on a GPU that is slower than the host they would cost
memory and gain nothing. As this choice depends on timing, it may differ between two runs with the
same settings. A replay does the arithmetic of an ordinary step with the learning rate rounded to
float32, which the ordinary steps of a GraphedStep read too; both gave the same bits where that was
tried (benchmarks/results/gpu.md). Under --deterministic graphs are used only if they are asked for.

The last ordinary step before a capture is checked for places where the host waits, which would
break the capture. If it fails nevertheless, the process is cleaned up and the run continues with
ordinary steps; only if that fails, too, the run ends with an error (see capture.py).
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..data.loader import Loader
from ..packed import PackedTokens
from ..reporting.console import Console
from ..training.train_step import StepParts, TrainStep
from .capture import CudaRecorder
from .launch_bound import LaunchBound

WARM_UP = 3  # ordinary steps before a capture, to set up memory, kernels and optimizer state


@runtime_checkable
class CountsOnHost(Protocol):
    """An optimizer whose host counts steps, and whose steps are not all alike."""

    captured: bool  # a graph holds the step: it leaves counting to whoever replays it

    @property
    def step_kind(self) -> tuple:
        """Of the next step; a graph can hold steps of one kind."""

    def count_step(self) -> None:
        """Counts a step that a graph has taken."""


class GraphedStep(TrainStep):
    """A TrainStep whose steps are captured as CUDA graphs, and replayed.

    Args:
        parts: of a run that CUDA graphs can serve (see engine.py), or one on a CPU in tests.
        loader: of the training split.
        console: reports whether graphs are used.
        recorder: captures the device's work.
        asked: the user asked for graphs; otherwise they are used if steps are launch-bound.
        rate_dtype: type in which kernels read the learning rate: float32 on a GPU, float64 on a
            CPU.
    """

    def __init__(
        self,
        parts: StepParts,
        loader: Loader,
        console: Console,
        recorder: CudaRecorder,
        asked: bool = True,
        rate_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(parts)
        self.loader, self.console = loader, console
        self.recorder, self.asked, self.rate_dtype = recorder, asked, rate_dtype
        device, optimizer = self.precision.device, self.optimizer
        self._counting = optimizer if isinstance(optimizer, CountsOnHost) else None
        groups = optimizer.param_groups
        self._rates = [torch.zeros((), dtype=rate_dtype, device=device) for _ in groups]
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._ema_weight = torch.zeros((), device=device)
        # Keyed by the signature of a batch, since batches may be mixed in different ways, and by
        # the kind of the optimizer's step.
        self._graphs: dict[tuple, tuple] = {}  # (static batch, replay function)
        self._seen = Counter()
        self.refused: str | None = None  # why no graphs are used any more
        self._warms_up = self._watches = self._replayed = False
        self._waits: list[str] = []  # where the host waited in a watched step
        # None once the question whether steps are launch-bound is settled, or does not arise.
        self._launches = None if asked else LaunchBound(recorder.mark)
        self._timed = Counter()  # whole steps, by their signature
        if asked:
            loader.suit_graphs()

    @property
    def holds_memory(self) -> bool:
        """Whether there are graphs, which keep the memory of a step."""
        return bool(self._graphs)

    def forward_backward(self, batch) -> None:
        """Replays the whole step if there is a graph for it."""
        found = self._graph_for(batch)
        if found is not None:
            static, replay = found
            self._replay(static, replay, batch)
            return
        with self._ordinary():
            super().forward_backward(self.loader.made(batch))

    def update(self) -> None:
        """The update of an ordinary step; after a replay, only its bookkeeping."""
        if not self._replayed:
            with self._ordinary(), self._rounded_rates():
                super().update()
            if self._launches is not None:
                self._launches.end()
            if self._waits:
                places = ", ".join(list(dict.fromkeys(self._waits))[:3])
                self._refuse(f"the host waits for the GPU within a step ({places})")
            return
        self._replayed = False
        if self._counting:
            self._counting.count_step()
        self.end_update()

    @contextlib.contextmanager
    def _ordinary(self) -> Iterator[None]:
        """The context of each part of an ordinary step."""
        with contextlib.ExitStack() as stack:
            if self._warms_up:
                stack.enter_context(self.recorder.warm_up())
            waits = stack.enter_context(self.recorder.watched()) if self._watches else []
            yield
        self._waits += waits

    def _graph_for(self, batch) -> tuple | None:
        self._warms_up = self._watches = self.settling = False
        if self.refused:
            return None
        key = None
        if len(batch.targets) == self.loader.usual_batch and batch.clean is None:
            key = _signature(batch), self._counting.step_kind if self._counting else ()
        if self._launches is not None and not self._is_launch_bound(self._launches, key):
            return None
        if key is None or _has_own_shape(batch.inputs):
            return None
        if key not in self._graphs:
            self.settling = True
            self._seen[key] += 1
            self._warms_up = self._seen[key] <= WARM_UP
            self._watches = self._seen[key] == WARM_UP
            # A capture takes as long as dozens of steps: the more graphs there are, the more often
            # a further one must have been needed.
            if self._seen[key] <= WARM_UP * max(1, len(self._graphs)):
                return None
            self._capture(batch, key)
        return self._graphs.get(key)

    def _is_launch_bound(self, launches: LaunchBound, key: tuple | None) -> bool:
        """Whether steps are known to be launch-bound; until then the next step may be timed.

        Args:
            key: the signature of its batch; None if the batch is smaller than the others.
        """
        verdict = launches.verdict()
        if verdict is None:
            self._timed[key] += 1
            self.settling = key is not None
            launches.begin(usual=key is not None and self._timed[key] > 1)
            return False
        self._launches = None
        if not verdict:
            self._refuse(f"{launches}: there is little to gain")
            return False
        self.console.say(f"CUDA graphs: used, because {launches}; --no_cuda_graphs turns them off")
        # Pictures: in the next epoch; the batches of this one are already augmented.
        self.loader.suit_graphs()
        return True

    def _capture(self, batch, key: tuple) -> None:
        static = _cloned(batch)

        def whole_step() -> None:
            with self._of_the_device():
                self.forward_backward_device(self.loader.made(static))
                self.update_device(self._step, self._ema_weight)

        try:
            self._graphs[key] = static, self.recorder.capture(whole_step)
        except RuntimeError as error:
            self._refuse(f"the capture failed ({' '.join(str(error).split())})")

    def _refuse(self, why: str) -> None:
        self._drop(why)
        self._waits.clear()
        if self.asked:
            self.console.say(f"--cuda_graphs: not used, because {why}")
        else:
            self.console.log(f"CUDA graphs: not used, because {why}")

    def free_memory(self) -> str:
        if not self.holds_memory:
            return ""
        self._drop("memory has run out")
        return "add --no_cuda_graphs: graphs hold the memory of another step"

    def _drop(self, why: str) -> None:
        """Stops using graphs and frees their memory."""
        self.refused, self._launches = why, None
        self.loader.suit_graphs(False)
        self._graphs.clear()
        self.strategy.drop_gradients()

    def _rounded_rates(self) -> contextlib.AbstractContextManager:
        """Rounds the learning rates of an ordinary step as a replay does."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        rounded = [torch.tensor(lr, dtype=self.rate_dtype).item() for lr in rates]  # on the CPU
        return _groups_changed(self.optimizer, rounded)

    @contextlib.contextmanager
    def _of_the_device(self) -> Iterator[None]:
        """Makes the optimizer read its learning rates from the device, and count nothing itself."""
        options = {"capturable": True} if self._step.is_cuda else {}
        with _groups_changed(self.optimizer, self._rates, **options):
            if self._counting:
                self._counting.captured = True
            try:
                yield
            finally:
                if self._counting:
                    self._counting.captured = False

    def _replay(self, static, replay: Callable[[], None], batch) -> None:
        for target, source in zip(static.tensors(), batch.tensors(), strict=True):
            target.copy_(source, non_blocking=True)
        step = self.progress.step
        self.schedule.apply(self.optimizer, step)
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._step.fill_(step)
        if self.average is not None:
            self._ema_weight.fill_(self.average.ema_weight(step))
        self._replayed = True
        self.updating = True
        replay()
        self.recorder.keep_pace()


@contextlib.contextmanager
def _groups_changed(
    optimizer: torch.optim.Optimizer, rates: list, **options: bool
) -> Iterator[None]:
    """Within it the groups have these learning rates, and the options that they know."""
    kept = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update({name: options[name] for name in options if name in group}, lr=rate)
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group.update({name: before[name] for name in ("lr", *options) if name in before})


def _has_own_shape(inputs: Tensor | tuple) -> bool:
    """Whether they are texts that the loader has not filled: no graph can take them."""
    return isinstance(inputs, PackedTokens) and inputs.borders is not None


def _signature(part) -> tuple:
    """Equal for batches that the same graph can take, or that are as many texts of their own
    lengths."""
    if _has_own_shape(part):
        return (part.samples,)
    if isinstance(part, Tensor):
        return tuple(part.shape), part.stride(), part.dtype
    return tuple(map(_signature, part)) if isinstance(part, tuple) else (part,)


def _cloned(part):
    """A copy of the batch, with its own tensors."""
    if isinstance(part, Tensor):
        return part.clone()
    return type(part)(*map(_cloned, part)) if isinstance(part, tuple) else part
