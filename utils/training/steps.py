"""Who takes the optimizer steps of a run."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from ..checkpoints.checkpoint import Checkpoint
from ..data.batch import Batch
from ..data.loader import Loader
from ..distributed.strategies.base import Strategy
from ..exchange import Exchange
from ..mixup.meta import PolicyMixup, SampleMixup
from .objective import Precision
from .progress import LeftOut, Progress


class Steps(ABC):
    """Takes the optimizer steps of a run, and holds all that they change: a TrainStep, an engine's
    kind of TrainStep, or LocalSteps, which holds one for each worker."""

    # As in StepParts:
    strategy: Strategy
    objective: Callable
    optimizer: torch.optim.Optimizer
    schedule: Any
    precision: Precision
    progress: Progress
    meta: PolicyMixup | SampleMixup | None = None
    model: nn.Module  # that of the strategy
    exchange: Exchange  # with the other processes
    sum_names: tuple[str, ...]  # of the objective
    # An update is under way. Weights, optimizer and average may then be of different steps, so the
    # state must not be saved.
    updating = False
    # The last step was slower than the steps to come, for example while CUDA graphs are captured;
    # such a step should not be timed.
    settling = False
    # Names the workers that left out steps between the last two calls of `read_sums`; "": none did,
    # or there are no workers.
    left_out_by = ""

    # ---- a step ---------------------------------------------------------------------------------

    def batches(self, loader: Loader, epoch: int, start_step: int = 0) -> Generator[Batch]:
        """This process's micro-batches of an epoch, from optimizer step `start_step` of it on, in
        the order in which it trains them."""
        return loader.epoch(epoch, start_step)

    def largest(self, loader: Loader) -> int:
        """An n such that none of these micro-batches takes more memory than `loader.trial(n)`."""
        return loader.largest()

    @abstractmethod
    def start(self) -> None:
        """To be called before the first step."""

    @abstractmethod
    def forward_backward(self, batch: Batch) -> None:
        """Forward and backward pass of a micro-batch, the first or a further one of a step."""

    @abstractmethod
    def update(self) -> None:
        """The optimizer's update, after the last micro-batch of a step."""

    @abstractmethod
    def take_back(self) -> None:
        """Undoes the passes of a step that will not be finished; not possible while `updating`."""

    def pass_without_effect(self, batch: Batch) -> None:
        """A forward and backward pass that leaves no trace; only for a strategy whose
        `adds_in_order` is False."""
        raise NotImplementedError

    def free_memory(self) -> str:
        """Frees what is held beyond the memory of ordinary steps. Returns what the user can do to
        save that memory; "" if nothing was held."""
        return ""

    # ---- what the host reads --------------------------------------------------------------------

    @abstractmethod
    def read_sums(self) -> tuple[dict[str, float], LeftOut]:
        """(the objective's sums since the last log line, over all ranks, by name; the steps of the
        run that were left out). Here, and in `loss_scale`, the host waits. Collective."""

    @abstractmethod
    def clear_window(self) -> None:
        """To be called after a log line."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Of the current step, or of the last one."""

    @property
    @abstractmethod
    def loss_scale(self) -> float | None:
        """None: there is no loss scaler. The host waits."""

    def figures(self) -> dict:
        """For the metrics."""
        return {}

    def note(self) -> str:
        """For the line of an epoch."""
        return ""

    def summary(self) -> str:
        """A line for the end of the run."""
        return ""

    def forecast(self) -> list[str]:
        """Lines for --dry_run, of the whole run."""
        return []

    def summary_entries(self) -> dict:
        """For the run's summary."""
        return {}

    # ---- weights and checkpoints ----------------------------------------------------------------

    @abstractmethod
    def evaluated_weights(self) -> contextlib.AbstractContextManager:
        """Within it the model holds the weights to evaluate."""

    @abstractmethod
    def snapshot(self) -> Checkpoint:
        """The present state of the run; the tensors may be its own, not copies. Collective."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores what `snapshot` has taken.

        Raises:
            UserError: the checkpoint is of another model or optimizer.
        """
