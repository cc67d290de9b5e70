"""Learning-rate schedules, counted in optimizer steps.

A schedule is a pure function of the step, so a resumed run needs none of its past, and the
learning rate is a number on the host: setting it waits for nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

SCHEDULES: dict[str, Callable[[float], float]] = {
    # progress after the warm-up, 0 to 1 -> factor of the base learning rate
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
}


@dataclass(frozen=True)
class Schedule:
    """factor(step) of the base learning rate: linear warm-up, then the named shape.

    Args:
        name: a key of SCHEDULES. Cosine: Loshchilov and Hutter, "SGDR" (2017), without restarts.
        total_steps: optimizer steps of the whole run, the warm-up among them.
        warmup_steps: step 0 gets 1 / warmup_steps of the rate, step warmup_steps - 1 all of it.
    """

    name: str
    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self):
        if self.name not in SCHEDULES:
            raise ValueError(f"the schedule is one of {sorted(SCHEDULES)}, not {self.name!r}")

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        after = max(1, self.total_steps - self.warmup_steps)
        return SCHEDULES[self.name](min(1.0, (step - self.warmup_steps) / after))

    def apply(self, optimizer, step: int) -> None:
        """Sets the rate of every parameter group for optimizer step `step` (from 0)."""
        factor = self.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
