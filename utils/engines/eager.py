"""Plain PyTorch: the model is called as it is, and TrainStep takes the steps."""

import functools
from collections.abc import Callable

from utils.data.loader import Loader
from utils.distributed.strategies.base import Strategy
from utils.engines.engine import RunFacts
from utils.engines.launch_bound import LaunchBound, TimedSteps, mark_on
from utils.reporting.console import Console
from utils.training.train_step import StepParts, TrainStep


class Eager:
    """An Engine for any run."""

    def __init__(self, asked: bool = False):
        self.asked = asked

    def why_not(self, facts: RunFacts) -> str | None:
        return None

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        return strategy.called

    def steps(self, parts: StepParts, loader: Loader, console: Console, advice: str) -> TrainStep:
        """On a GPU some steps are timed: if they are launch-bound, a line says what helps."""
        device = parts.precision.device
        if device.type != "cuda":
            return TrainStep(parts)
        launches = LaunchBound(functools.partial(mark_on, device))
        whole = min(loader.step_size, loader.samples)
        return TimedSteps(parts, launches, whole, lambda: console.say(f"{launches}: {advice}"))
