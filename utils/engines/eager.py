"""Plain PyTorch: the model is called as it is, and TrainStep takes its own steps."""

import functools
from collections.abc import Callable

from utils.distributed.strategies.base import Strategy
from utils.engines.engine import RunFacts
from utils.engines.launch_bound import LaunchBound, TimedSteps, mark_on
from utils.reporting.console import Console
from utils.training.loader import TrainingLoader
from utils.training.stepper import Stepper
from utils.training.train_step import TrainStep


class Eager:
    """An Engine for any run."""

    def __init__(self, asked: bool = False):
        self.asked = asked

    def why_not(self, facts: RunFacts) -> str | None:
        return None

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        return strategy.called

    def stepper(
        self, train_step: TrainStep, loader: TrainingLoader, console: Console, advice: str
    ) -> Stepper:
        """On a GPU some steps are timed: if they are launch-bound, a line says what helps."""
        device = train_step.precision.device
        if device.type != "cuda":
            return train_step
        launches = LaunchBound(functools.partial(mark_on, device))
        whole = min(loader.step_size, loader.samples)
        return TimedSteps(train_step, launches, whole, lambda: console.say(f"{launches}: {advice}"))
