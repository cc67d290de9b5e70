"""Takes a whole optimizer step as one CUDA graph, captured once and replayed.

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

By default the first few steps are ordinary ones, and timed, and graphs are captured only where
steps are launch-bound (see launch_bound.py). Where the GPU is slower than the host anyway, they
would take memory and gain nothing. The choice rests on times and so may differ between two runs of
the same settings. A replay does the arithmetic of an ordinary step, at the learning rate rounded to
float32, which the ordinary steps of a GraphedStep therefore read too; but that the bits are equal
has not been tested on a GPU. So under --deterministic nothing is chosen by time: there are graphs
only if they are asked for.

What would break a capture, the host waiting for the device, is looked for in the last ordinary step
before it. Where a capture fails nevertheless, the process is cleaned up and the run goes on by
ordinary steps; only where even that fails, it ends with a line (see capture.py).
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from utils.engines.capture import Recorder
from utils.engines.engine import EngineTrainer
from utils.engines.launch_bound import LaunchBound

WARM_UP = 3  # ordinary steps before a capture: memory, kernels and optimizer states are set up


class GraphedStep:
    """A Stepper: takes a Trainer's steps in its place.

    Args:
        trainer: of a run that CUDA graphs can serve (see cuda_graphs.py); the tests' have no GPU.
        recorder: of the work of its device.
        asked: the user has asked for graphs; else they are made only where steps are launch-bound.
    """

    def __init__(self, trainer: EngineTrainer, recorder: Recorder, asked: bool = True):
        self.trainer, self.recorder, self.asked = trainer, recorder, asked
        device = trainer.precision.device
        # A GPU's kernels read the rate as float32; a CPU's, which the tests capture, as float64.
        self._rate_dtype = torch.float32 if device.type == "cuda" else torch.float64
        groups = trainer.optimizer.param_groups
        self._rates = [torch.zeros((), dtype=self._rate_dtype, device=device) for _ in groups]
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._ema_weight = torch.zeros((), device=device)
        # By the signature of their batches, which are mixed in one way or another:
        self._graphs: dict[tuple, tuple] = {}  # the batch that is copied into, and the replay
        self._seen = Counter()
        self.refused: str | None = None  # why no graph is made any more
        self._warms_up = self._watches = self._replayed = False
        self._waits: list[str] = []  # where the host waited in a watched step
        self.settling = False  # the last step was not like those to come
        # Until it is known whether steps are launch-bound:
        self._launches = None if asked else LaunchBound(recorder.mark)
        self._timed = Counter()  # whole steps, by their signature
        if asked:
            trainer.loader.defer()

    @property
    def holds_memory(self) -> bool:
        """There are graphs, which keep the memory of a step."""
        return bool(self._graphs)

    def forward_backward(self, batch) -> None:
        """All of the step, where there is a graph for it."""
        found = self._graph_for(batch)
        if found is not None:
            self._replay(*found, batch)
            return
        with self._ordinary():
            self.trainer.forward_backward(self.trainer.loader.made(batch))

    def update(self) -> None:
        """The rest of it."""
        if not self._replayed:
            with self._ordinary(), self._rounded_rates():
                self.trainer.update()
            if self._launches is not None:
                self._launches.end()
            if self._waits:
                places = ", ".join(list(dict.fromkeys(self._waits))[:3])
                self._refuse(f"the host waits for the GPU within a step ({places})")
            return
        self._replayed = False
        self.trainer.end_update()

    @contextlib.contextmanager
    def _ordinary(self) -> Iterator[None]:
        """Around each part of an ordinary step."""
        with contextlib.ExitStack() as stack:
            if self._warms_up:
                stack.enter_context(self.recorder.warm_up())
            waits = stack.enter_context(self.recorder.watched()) if self._watches else []
            yield
        self._waits += waits

    def _graph_for(self, batch) -> tuple | None:
        self._warms_up = self._watches = self.settling = False
        loader = self.trainer.loader
        whole = min(loader.batch_size, loader.step_size, loader.samples)
        if self.refused:
            return None
        key = _signature(batch) if len(batch.targets) == whole else None
        if self._launches is not None and not self._is_launch_bound(key):
            return None
        if key is None:
            return None
        if key not in self._graphs:
            self.settling = True
            self._seen[key] += 1
            self._warms_up = self._seen[key] <= WARM_UP
            self._watches = self._seen[key] == WARM_UP
            if self._warms_up:
                return None
            self._capture(batch, key)
        return self._graphs.get(key)

    def _is_launch_bound(self, key: tuple | None) -> bool:
        """Whether steps are known to be; while nothing is known the step that comes may be timed.

        Args:
            key: the signature of its batch; None if that is not a whole one.
        """
        launches = self._launches
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
        console = self.trainer.console
        console.say(f"CUDA graphs: used, because {launches}; --no_cuda_graphs does without")
        # From the next epoch on; the batches of this one have been augmented by the loader.
        self.trainer.loader.defer()
        return True

    def _capture(self, batch, key: tuple) -> None:
        trainer, static = self.trainer, _cloned(batch)

        def whole_step() -> None:
            with self._rates_as_tensors():
                trainer.forward_backward_device(trainer.loader.made(static))
                trainer.update_device(self._step, self._ema_weight)

        try:
            self._graphs[key] = static, self.recorder.capture(whole_step)
        except RuntimeError as error:
            self._refuse(f"the capture failed ({' '.join(str(error).split())})")

    def _refuse(self, why: str) -> None:
        self._drop(why)
        self._waits.clear()
        console = self.trainer.console
        if self.asked:
            console.say(f"--cuda_graphs: not used, because {why}")
        else:
            console.log(f"CUDA graphs: not used, because {why}")

    def free_memory(self) -> str:
        if not self.holds_memory:
            return ""
        self._drop("memory has run out")
        return "add --no_cuda_graphs: graphs keep the memory of a step besides"

    def _drop(self, why: str) -> None:
        """No graphs any more; their memory is free again."""
        self.refused, self._launches = why, None
        self._graphs.clear()
        self.trainer.strategy.drop_gradients()

    @contextlib.contextmanager
    def _rounded_rates(self) -> Iterator[None]:
        """Within it an ordinary step reads the rates as a replay does."""
        groups = self.trainer.optimizer.param_groups
        kept = [group["lr"] for group in groups]
        for group, lr in zip(groups, kept, strict=True):
            group["lr"] = torch.tensor(lr, dtype=self._rate_dtype).item()  # of a CPU: no wait
        try:
            yield
        finally:
            for group, lr in zip(groups, kept, strict=True):
                group["lr"] = lr

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
            self._ema_weight.fill_(trainer.average.ema_weight(step))
        self._replayed = True
        trainer.begin_update()
        replay()
        self.recorder.keep_pace()


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
