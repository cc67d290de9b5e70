"""An engine, and the facts of a run on which its use depends.

To add an engine, write its file in this folder and a line in the table in choose.py, and name it in
`_wanted` there or in the choices of `--engine` (utils/settings/engine.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from utils.data.loader import Loader
from utils.distributed.strategies.base import Strategy
from utils.engines.launch_bound import LaunchBound, TimedSteps, mark_on
from utils.reporting.console import Console
from utils.training.steps import Steps
from utils.training.train_step import StepParts, TrainStep


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


class Engine:
    """Computes the optimizer steps. This one, which serves any run, is plain PyTorch: the model is
    called as it is, and TrainStep takes the steps. Others override what differs.

    Args:
        asked: the user has asked for it by name, and is told why if it cannot be used. Otherwise it
            is tried without a message.
    """

    def __init__(self, asked: bool = False):
        self.asked = asked

    def why_not(self, facts: RunFacts) -> str | None:
        """Why it cannot serve the run; None: it can."""
        return None

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        """What the objective calls: `strategy.called`, or what stands in its place. `console`: for
        messages."""
        return strategy.called

    def steps(self, parts: StepParts, loader: Loader, console: Console, advice: str) -> Steps:
        """Makes the object that takes the optimizer steps. On a GPU some of them are timed: if they
        are launch-bound, a line says what helps.

        Args:
            console: for messages.
            advice: what to tell the user if steps are launch-bound and the engine cannot help.
        """
        device = parts.precision.device
        if device.type != "cuda":
            return TrainStep(parts)
        launches = LaunchBound(functools.partial(mark_on, device))
        whole = min(loader.step_size, loader.samples)
        return TimedSteps(parts, launches, whole, lambda: console.say(f"{launches}: {advice}"))


class Compile(Engine):
    """`--compile`: the model is compiled by torch.compile."""

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        return torch.compile(strategy.called)
