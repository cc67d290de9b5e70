"""The interface of an engine, and the facts of a run on which its use depends.

To add an engine, write its file in this folder and a line in the table in choose.py, and name it in
`_wanted` there or in the choices of `--engine` (utils/settings/engine.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from utils.data.loader import Loader
from utils.distributed.strategies.base import Strategy
from utils.reporting.console import Console
from utils.training.steps import Steps
from utils.training.train_step import StepParts


@dataclass(frozen=True)
class RunFacts:
    """The facts that decide which engines can serve a run.

    Args:
        device: where the model is.
        compiled: the user wants the model compiled.
        texts: batches are of texts, and so of many sizes.
        scales_loss: training is in fp16, with a loss scaler.
        processes: how many train together.
        accumulation: micro-batches of each rank in an optimizer step.
        capturable: a CUDA graph can hold the optimizer's step.
        learns_mixing: every step also learns how samples are mixed.
        unfreezes: frozen parameters are trained from some epoch on.
        recomputes: activations are computed again in the backward pass.
        external_model: the model is not one of utils/models/, so what its forward pass does on the
            host is unknown.
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
    recomputes: bool
    external_model: bool


class Engine(Protocol):
    """Computes the optimizer steps. It is made with one argument:

    Args:
        asked: the user has asked for it by name, and is told why if it cannot be used. Otherwise it
            is tried without a message.
    """

    def why_not(self, facts: RunFacts) -> str | None:
        """Why it cannot serve the run; None: it can."""

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        """What the objective calls: `strategy.called`, or what stands in its place. `console`: for
        messages."""

    def steps(self, parts: StepParts, loader: Loader, console: Console, advice: str) -> Steps:
        """Makes the object that takes the optimizer steps.

        Args:
            console: for messages.
            advice: what to tell the user if steps are launch-bound and the engine cannot help.
        """
