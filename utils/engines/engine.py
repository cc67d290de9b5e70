"""What an engine is, what it is told of a run, and what it uses of a Trainer.

An engine is a file in this folder and a line of the table in choose.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from utils.reporting.console import Console
from utils.training.average import Average
from utils.training.objective import Precision
from utils.training.progress import Progress
from utils.training.stepper import Stepper


@dataclass(frozen=True)
class RunFacts:
    """What decides which engines can serve a run.

    Args:
        device: where the model is.
        compiled: the user wants the model compiled.
        texts: batches are of texts, and so of many sizes.
        scales_loss: training is in fp16, with a loss scaler.
        processes: number of them.
        accumulation: micro-batches in an optimizer step.
        capturable: a CUDA graph can hold the optimizer's step.
        learns_mixing: some steps also learn how samples are mixed.
        unfreezes: which parameters are trained changes in the course of the run.
    """

    device: torch.device
    compiled: bool
    texts: bool
    scales_loss: bool
    processes: int
    accumulation: int
    capturable: bool
    learns_mixing: bool
    unfreezes: bool


class EngineTrainer(Protocol):
    """What an engine uses of a Trainer (see training/trainer.py)."""

    precision: Precision
    optimizer: torch.optim.Optimizer
    schedule: Any
    loader: Any
    strategy: Any
    average: Average | None
    progress: Progress
    console: Console
    advice: dict[str, str]

    def forward_backward(self, batch) -> None: ...

    def forward_backward_device(self, batch) -> None: ...

    def update(self) -> None: ...

    def begin_update(self) -> None: ...

    def update_device(self, step: int | torch.Tensor, ema_weight: float | torch.Tensor) -> None: ...

    def end_update(self) -> None: ...

    def delegate_steps(self, stepper: Stepper) -> None: ...


class Engine(Protocol):
    """Computes the steps of a training. It is made with one argument:

    Args:
        asked: the user has asked for it by name, and is told what keeps it from serving. Otherwise
            it is tried, and nothing is said.
    """

    def why_not(self, facts: RunFacts) -> str | None:
        """Why it cannot serve the run; None: it can."""

    def wrap(self, model: Callable) -> Callable:
        """What the objective calls in place of the model."""

    def take_steps(self, trainer: EngineTrainer) -> None:
        """The Trainer's steps are taken by this engine from here on."""
