"""`--cuda_graphs`: a whole optimizer step as one CUDA graph, captured once and replayed.

What the host launches kernel by kernel, augmentation, forward, backward, clipping, optimizer,
guard and average, is launched at once. After the rules of PyTorch's notes on CUDA graphs: the steps
before the capture run on a side stream; a batch is copied into tensors that stay where they are;
gradients are made anew within the graph; its memory is a pool of its own. What the host decides
from step to step (the learning rate, the step's number, the weight of the average) is written into
tensors before a replay. Dropout draws from PyTorch's own generator, which `torch.cuda.graph`
registers with the graph. Of pictures that live on the device a batch is which they are and what
happens to each; where they come from the host the loader has augmented them.

A batch of another size, the last one of an epoch, takes an ordinary step. Nobody else may have the
memory of a graph, so that of a step is there twice; where it cannot be, there are no graphs.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

WARM_UP = 3  # ordinary steps before a capture: memory, kernels and optimizer states are set up
CAPTURABLE = (torch.optim.SGD, torch.optim.AdamW)


class Recorder(Protocol):
    """What captures work of the device."""

    def warm_up(self) -> contextlib.AbstractContextManager:
        """Around work that is like that which is captured later."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """What does the work of function() again, with the present content of the tensors that it
        reads. Nothing is done meanwhile.

        Raises:
            RuntimeError: it cannot be captured, or leaves no memory to ordinary work.
        """


class CudaGraphs:
    """By `torch.cuda.graph`. All graphs share a pool of memory, for none leaves anything in it.

    What ordinary work needs besides is the most that it has needed so far.
    """

    def __init__(self, device: torch.device):
        self.side = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        training = torch.cuda.current_stream(self.side.device)
        self.side.wait_stream(training)
        with torch.cuda.stream(self.side):
            yield
        training.wait_stream(self.side)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph, device = torch.cuda.CUDAGraph(), self.side.device
        needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        # The thread that writes checkpoints may go on meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            function()
        # What was reserved and unused has been given back before the capture.
        free, _ = torch.cuda.mem_get_info(device)
        if free < needed:
            raise RuntimeError(
                f"it leaves {free / 1e9:.2f} GB, and an ordinary step, which the last one of an "
                f"epoch is, takes {needed / 1e9:.2f} GB: take a smaller batch"
            )
        return graph.replay


def use_graphs(trainer, *, compiled: bool, texts: bool) -> None:
    """The Trainer takes its steps by graphs from here on; says why, if it cannot.

    Args:
        compiled: the model is.
        texts: batches are of texts.
    """
    reason = why_not(trainer, compiled=compiled, texts=texts)
    if reason is not None:
        trainer.console.say(f"--cuda_graphs: not used, because {reason}")
        return
    trainer.stepper = GraphedStep(trainer, CudaGraphs(trainer.precision.device))


def why_not(trainer, *, compiled: bool, texts: bool) -> str | None:
    """What a graph cannot hold, if there is any; None: it holds the step."""
    if trainer.precision.device.type != "cuda":
        return "there is no GPU"
    if compiled:
        return "--compile makes kernels of its own"
    if texts:
        return "every batch of texts has other lengths"
    if trainer.scaler.is_enabled():
        return "the loss scaler of fp16 decides on the host; take --precision bf16"
    if trainer.exchange.size > 1:
        return "there are several processes"
    if trainer.loader.accumulation > 1:
        return "gradients are accumulated over several batches"
    if type(trainer.optimizer) not in CAPTURABLE:
        return "the optimizer counts on the host; take --optimizer sgd or adamw, no --lookahead_k"
    if trainer.meta is not None:
        return "--mixup meta takes other steps now and then"
    if trainer.freeze is not None and trainer.freeze.until is not None:
        return "--unfreeze_epoch changes what is trained"
    return None


class GraphedStep:
    """Takes a Trainer's steps in its place: has its `forward_backward` and `update`.

    Args:
        trainer: one of which `why_not` says nothing but that there is no GPU.
        recorder: of the work of its device.
    """

    def __init__(self, trainer, recorder: Recorder):
        self.trainer, self.recorder = trainer, recorder
        device = trainer.precision.device
        # A GPU's kernels read the rate as float32; a CPU's, which the tests capture, as float64.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        groups = trainer.optimizer.param_groups
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in groups]
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._share = torch.zeros((), device=device)
        # By the signature of their batches, which are mixed in one way or another:
        self._graphs: dict[tuple, tuple] = {}  # the batch that is copied into, and the replay
        self._seen = Counter()
        self.refused: str | None = None  # why no graph is made any more
        self._warms_up = self._replayed = False
        self.settling = False  # the last step was not like those to come
        trainer.loader.defer()

    def forward_backward(self, batch) -> None:
        """All of the step, where there is a graph for it."""
        found = self._graph_for(batch)
        if found is not None:
            self._replay(*found, batch)
            return
        with self._stream():
            self.trainer.forward_backward(self.trainer.loader.made(batch))

    def update(self) -> None:
        """The rest of it."""
        if not self._replayed:
            with self._stream():
                self.trainer.update()
            return
        self._replayed = False
        self.trainer.progress.step += 1
        self.trainer.updating = False

    def _stream(self) -> contextlib.AbstractContextManager:
        return self.recorder.warm_up() if self._warms_up else contextlib.nullcontext()

    def _graph_for(self, batch) -> tuple | None:
        self._warms_up = self.settling = False
        loader = self.trainer.loader
        whole = min(loader.batch_size, loader.step_size, loader.samples)
        if self.refused or len(batch.targets) != whole:
            return None
        key = _signature(batch)
        if key not in self._graphs:
            self.settling = True
            self._seen[key] += 1
            self._warms_up = self._seen[key] <= WARM_UP
            if self._warms_up:
                return None
            self._capture(batch, key)
        return self._graphs.get(key)

    def _capture(self, batch, key: tuple) -> None:
        trainer, static = self.trainer, _cloned(batch)

        def whole_step() -> None:
            with self._rates_as_tensors():
                trainer.forward_backward(trainer.loader.made(static))
                trainer.update_device(self._step, self._share)

        try:
            self._graphs[key] = static, self.recorder.capture(whole_step)
        except RuntimeError as error:
            self.drop(f"the capture failed ({' '.join(str(error).split())})")
            trainer.console.say(f"--cuda_graphs: not used, because {self.refused}")

    def drop(self, why: str) -> None:
        """No graphs any more; their memory is free again."""
        self.refused = why
        self._graphs.clear()
        self.trainer.strategy.drop_gradients()

    @contextlib.contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        """Within it the optimizer reads its rates from the device."""
        groups = self.trainer.optimizer.param_groups
        cuda = self._step.is_cuda
        kept = [
            {name: group[name] for name in ("lr", "capturable") if name in group}
            for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if cuda and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update(before)

    def _replay(self, static, replay: Callable[[], None], batch) -> None:
        trainer = self.trainer
        for target, source in zip(static.tensors(), batch.tensors(), strict=True):
            target.copy_(source, non_blocking=True)
        step, optimizer = trainer.progress.step, trainer.optimizer
        trainer.schedule.apply(optimizer, step)
        for rate, group in zip(self._rates, optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._step.fill_(step)
        if trainer.average is not None:
            self._share.fill_(trainer.average.share(step))
        trainer.updating = self._replayed = True
        replay()


def _signature(part) -> tuple:
    """Alike for batches that one graph can take."""
    if isinstance(part, Tensor):
        return tuple(part.shape), part.stride(), part.dtype
    return tuple(map(_signature, part)) if isinstance(part, tuple) else (part,)


def _cloned(part):
    """A batch with tensors of its own."""
    if isinstance(part, Tensor):
        return part.clone()
    return type(part)(*map(_cloned, part)) if isinstance(part, tuple) else part
