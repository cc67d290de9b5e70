"""One optimizer step: the passes of its micro-batches, then the update.

Only `read_sums` and `loss_scale` wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..checkpoints.checkpoint import FORMAT, Checkpoint
from ..checkpoints.shards import divided
from ..checkpoints.states import (
    optimizer_tensors,
    random_states,
    restore_optimizer,
    restore_random_states,
)
from ..checkpoints.worker_rows import as_one_model
from ..data.batch import Batch
from ..distributed.strategies.base import Strategy
from ..mixup.meta import PolicyMixup, SampleMixup
from .average import Average
from .guard import Guard
from .objective import SUMS, WEIGHT, Precision, stacked
from .progress import LeftOut, Progress
from .steps import Steps


@dataclass
class StepParts:
    """What a TrainStep is made of."""

    strategy: Strategy  # how the model is spread over processes
    # (inputs, targets, mixing plan) -> summed loss, sums by name; `objective.sums` are the names,
    # by default SUMS (see objective.py).
    objective: Callable
    optimizer: torch.optim.Optimizer  # honours `found_inf` (see optim/factory.py)
    schedule: Any  # `apply(optimizer, step)` sets the learning rate
    precision: Precision  # its loss scaler is used around the backward pass
    progress: Progress  # counts the steps
    guard: Guard  # judges whether a step is finite
    clip: float | None = None  # maximal global L2 norm of the gradient; None: unlimited
    average: Average | None = None  # of the weights, evaluated in their place; None: none
    # Learns how samples are mixed; None: the batch has its whole plan, if it is mixed.
    meta: PolicyMixup | SampleMixup | None = None


class TrainStep(Steps):
    """Takes the optimizer steps of a process alone, or of one among others that step together."""

    def __init__(self, parts: StepParts):
        self.parts, self.strategy = parts, parts.strategy
        self.model, self.exchange = self.strategy.model, self.strategy.exchange
        self.objective, self.optimizer = parts.objective, parts.optimizer
        self.schedule, self.progress = parts.schedule, parts.progress
        self.precision, self.scaler = parts.precision, parts.precision.scaler()
        self.guard, self.clip = parts.guard, parts.clip
        self.average, self.meta = parts.average, parts.meta
        self.sum_names = getattr(self.objective, "sums", SUMS)
        self._loss = self.sum_names.index("loss")
        zeros = torch.zeros(len(self.sum_names), dtype=torch.float64, device=self.precision.device)
        self.step_sums, self.window = zeros, zeros.clone()  # of this step; since the last log line

    def start(self) -> None:
        self.strategy.drop_gradients()
        self.guard.start()

    def forward_backward(self, batch: Batch) -> None:
        # First, since `meta` reads the learning rate; all micro-batches of a step set the same one.
        self.schedule.apply(self.optimizer, self.progress.step)
        self.forward_backward_device(batch)

    def forward_backward_device(self, batch: Batch) -> None:
        """Device part of `forward_backward`; the learning rate is set already."""
        mix_plan = batch.mix_plan
        if self.meta is not None:
            mix_plan = self.meta.choose(batch, self.learning_rate)
        with self.strategy.micro_batch(batch.ends_step):
            loss, sums = self.objective(batch.inputs, batch.targets, mix_plan)
            # The strategy averages gradients over the ranks, so the loss is multiplied by their
            # number here: the result is the gradient of the mean over the samples of the whole
            # step. A filler does not count; it lets all ranks run equally many passes.
            mean = loss / (batch.step_samples / self.exchange.size)
            self.scaler.scale(mean * 0 if batch.filler else mean).backward()
        self.guard.collect_buffers()
        if not batch.filler:
            self.step_sums += stacked(sums, self.sum_names)

    def update(self) -> None:
        self.updating = True
        step = self.progress.step
        self.update_device(step, self.average.ema_weight(step) if self.average else 0.0)
        self.end_update()

    def end_update(self) -> None:
        self.progress.step += 1
        self.updating = False

    def update_device(self, step: int | torch.Tensor, ema_weight: float | torch.Tensor) -> None:
        """Device part of `update`; for a CUDA graph `step` and `ema_weight` are tensors that the
        host fills."""
        self.strategy.collect_gradients()
        self.scaler.unscale_(self.optimizer)
        if WEIGHT in self.sum_names:
            self._divide_by_weight()
        norm, loss = self.guard.gradient_norm(), self.guard.agree(self.step_sums[self._loss])
        self.guard.tell_scaler(self.scaler, self.optimizer, norm)
        bad = self.guard.judge(loss, norm, step, self.scaler.is_enabled())
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.guard.parameters, self.clip, norm)
        if self.meta is not None:
            self.meta.update(bad, self.learning_rate)
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        self.strategy.drop_gradients()
        self.scaler.update()
        self.guard.take_back(bad)
        self.strategy.after_step(self.learning_rate, bad)
        if self.average is not None:
            self.average.update(ema_weight, bad)
        self.window += torch.where(bad, 0.0, self.step_sums)
        self.step_sums.zero_()
        self.guard.remember()

    def _divide_by_weight(self) -> None:
        """The passes have divided the sum of the weighted losses by the samples of the step. Makes
        the gradients those of this sum divided by the sum of the weights, over all ranks."""
        own = [self.step_sums[self.sum_names.index(name)] for name in ("samples", WEIGHT)]
        samples, weight = self.exchange.sum(torch.stack(own)).unbind()
        # All samples of a step may have weight 0: there is nothing to learn from them.
        self.guard.scale_gradients(torch.where(weight > 0, samples / weight, 0.0))

    def pass_without_effect(self, batch: Batch) -> None:
        loss, _ = self.objective(batch.inputs, batch.targets, batch.mix_plan)
        (loss * 0).backward()
        self.guard.collect_buffers()
        self.take_back()

    def take_back(self) -> None:
        assert not self.updating
        self.guard.take_back(torch.ones((), dtype=torch.bool, device=self.precision.device))
        self.strategy.drop_gradients()
        self.step_sums.zero_()

    def read_sums(self) -> tuple[dict[str, float], LeftOut]:
        window = self.exchange.sum(self.window)
        values = torch.cat([window, self.guard.left_out.double()]).tolist()
        count = len(self.sum_names)
        sums = dict(zip(self.sum_names, values[:count], strict=True))
        return sums, LeftOut(*map(int, values[count:]))

    def clear_window(self) -> None:
        self.window.zero_()

    @property
    def loss_scale(self) -> float | None:
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def snapshot(self) -> Checkpoint:
        names = {parameter: name for name, parameter in self.strategy.parameters.items()}
        moments, optimizer = optimizer_tensors(self.optimizer, names)
        parts = {"model": self.strategy.tensors(), "optimizer": moments}
        if self.average is not None:
            parts["average"] = self.average.state_dict()
        # Meta-mixup of the form "sample" has no state.
        if self.meta is not None and (learned := self.meta.state_dict()):
            parts["mixup"] = learned
        state = {
            "format": FORMAT,
            "progress": asdict(self.progress),
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": self.exchange.gather_json(random_states()),
        }
        parts, rows = divided(parts, self.strategy.parameters, self.exchange)
        return Checkpoint(self.progress.step, state, parts, rows)

    def restore(self, checkpoint: Checkpoint, worker: int | None = None) -> None:
        """`worker`: whose random state is restored; None: this rank's."""
        saved, exchange = as_one_model(checkpoint), self.exchange
        state = saved.state
        names = {parameter: name for name, parameter in self.strategy.parameters.items()}
        self.strategy.load(saved.model)
        moments = saved.parts["optimizer"]
        restore_optimizer(self.optimizer, names, moments, state["optimizer"], exchange)
        self.schedule.load_state_dict(state.get("schedule", {}))
        if self.average is not None:
            # If the checkpoint has no average, the average starts from its weights.
            self.average.load_state_dict(saved.weights)
        if self.meta is not None:
            self.meta.load_state_dict(saved.parts.get("mixup", {}))
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        number = exchange.rank if worker is None else worker
        restore_random_states(state["random"], number, saved.step)
        self.progress.load(state["progress"])
        if exchange.rank == 0:  # the sums are totals over all ranks, so one rank restores them
            # A sum that the checkpoint lacks starts at 0.
            sums = [self.progress.window_sums.get(name, 0.0) for name in self.sum_names]
            self.window.copy_(torch.tensor(sums, dtype=torch.float64))
        self.guard.left_out.copy_(torch.tensor(self.progress.left_out))

    def evaluated_weights(self) -> contextlib.AbstractContextManager:
        """The model holds the average's weights, if there is one."""
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    @property
    def learning_rate(self) -> float:
        group = self.optimizer.param_groups[0]
        return group["lr"] / group.get("lr_scale", 1.0)
