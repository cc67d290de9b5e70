"""PyTorch as it comes: the model is called, and the Trainer takes its own steps."""

import functools
from collections.abc import Callable

from utils.engines.engine import EngineTrainer, RunFacts
from utils.engines.launch_bound import LaunchBound, TimedSteps, mark_on


class Eager:
    """An Engine for any run."""

    def __init__(self, asked: bool = False):
        self.asked = asked

    def why_not(self, facts: RunFacts) -> str | None:
        return None

    def wrap(self, model: Callable) -> Callable:
        return model

    def take_steps(self, trainer: EngineTrainer) -> None:
        """On a GPU some steps are timed: if they are launch-bound, a line says what helps."""
        device = trainer.precision.device
        if device.type == "cuda":
            launches = LaunchBound(functools.partial(mark_on, device))
            trainer.delegate_steps(TimedSteps(trainer, launches))
