"""What an engine is, and what it is told of a run.

An engine is a file in this folder and a line of the table in choose.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from utils.reporting.console import Console
from utils.training.loader import TrainingLoader
from utils.training.stepper import Stepper
from utils.training.train_step import TrainStep


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

    def stepper(
        self, train_step: TrainStep, loader: TrainingLoader, console: Console, advice: str
    ) -> Stepper:
        """What takes the steps of a training.

        Args:
            console: where it says what it does.
            advice: what to say where steps are launch-bound and it can do nothing about it.
        """
