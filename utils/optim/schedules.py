"""Learning-rate schedules, counted in optimizer steps.

All but `Plateau` are functions of the step alone; only `Plateau` has a state, which every
checkpoint holds. The learning rate is a number on the host: setting it waits for nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .. import user_files
from ..errors import UserError

# name -> the flags that have an effect with it; "warmup" stands for --warmup_epochs and
# --warmup_steps. A schedule is a line here, its factor in `Schedule.after_warmup`, a row in
# docs/flags.md, and a name in LENGTH_INDEPENDENT if it is that.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "cosine": ("min_lr", "warmup"),
    "linear": ("min_lr", "warmup"),
    "step": ("gamma", "step_epochs", "warmup"),
    "multistep": ("gamma", "milestones", "warmup"),
    "onecycle": (),
    "plateau": ("gamma", "plateau_patience", "min_lr", "warmup"),
    "constant": ("warmup",),
}
# Schedules that do not depend on how many steps there will be. (step and multistep do not either,
# where --step_epochs or --milestones say when the rate falls.)
LENGTH_INDEPENDENT = ("plateau", "constant")
# onecycle, as PyTorch's OneCycleLR by default: the fraction of the run in which the rate rises,
# what the peak rate is divided by for the first step, and what that is divided by for the last one.
RISE, START_DIVISOR, END_DIVISOR = 0.3, 25.0, 1e4
# plateau: a loss must fall by this fraction to count as lower (PyTorch's ReduceLROnPlateau).
PLATEAU_THRESHOLD = 1e-4


@dataclass
class Schedule:
    """factor(step) of the peak learning rate: linear warm-up, then the named shape.

    Args:
        name: a key of SCHEDULES but "plateau" (see `Plateau`). Cosine: Loshchilov and Hutter,
            "SGDR" (2017), without restarts; onecycle: Smith and Topin, "Super-convergence"
            (2018), without its cycle of the momentum; step and multistep: PyTorch's StepLR and
            MultiStepLR.
        total_steps: optimizer steps of the schedule, with the warm-up. Beyond it cosine, linear and
            onecycle keep their last factor.
        warmup_steps: step 0 gets 1 / warmup_steps of the rate, step warmup_steps - 1 all of it.
        warmup_start: the factor of step 0 instead; it then rises to 1 at step warmup_steps.
        min_factor: the factor that cosine and linear end with, and plateau's lowest, 0 to 1.
        gamma: what step, multistep and plateau multiply the rate by when it falls.
        step_size: "step" only: optimizer steps between two falls of the rate, from step 0 on.
        milestones: "multistep" only: the optimizer steps at which the rate falls.
        epoch_steps: the rate changes once in so many steps, at the start of an epoch; epoch e of W
            epochs of warm-up has (e + 1) / (W + 1) of it. None: it changes in every step.
        corrections: (step, total steps) each: from that step on, what is left of the curve is
            spread over the steps that are left (see `position`).
        stretches: whether they have an effect: False where the rate falls at given epochs.
        curve: (the fraction of the steps after the warm-up, 0 to 1) -> the factor, of the user's
            own; None: that of `name`.
    """

    name: str
    total_steps: int
    warmup_steps: int = 0
    min_factor: float = 0.0
    gamma: float = 0.1
    step_size: int = 1
    milestones: tuple[int, ...] = ()
    epoch_steps: int | None = None
    warmup_start: float | None = None
    corrections: list[tuple[int, int]] = field(default_factory=list)
    stretches: bool = True
    curve: Callable[[float], float] | None = None

    def factor(self, step: int) -> float:
        if self.epoch_steps is not None:
            epoch, warmup = step // self.epoch_steps, self.warmup_steps / self.epoch_steps
            step = epoch * self.epoch_steps
            if step < self.warmup_steps and self.warmup_start is None:
                return (epoch + 1) / (warmup + 1)
        if step < self.warmup_steps:
            if self.warmup_start is not None:
                return self.warmup_start + (1 - self.warmup_start) * step / self.warmup_steps
            return (step + 1) / self.warmup_steps
        return self.after_warmup(self.position(step))

    def position(self, step: int) -> float:
        """The step that has the place of `step`, which is not in the warm-up, in the curve of
        `total_steps` steps without corrections."""
        if not (self.corrections and self.stretches):
            return step
        position, at, total = float(self.warmup_steps), self.warmup_steps, self.total_steps
        for start, length in (*self.corrections, (step, 0)):
            start = min(max(start, at), step)
            position += (start - at) * (self.total_steps - position) / max(1, total - at)
            at, total = start, length
        return position

    def after_warmup(self, step: float) -> float:
        """`step` counts from the start of the run, and is not in the warm-up: at its first step the
        factor is 1 for the schedules that begin at the peak."""
        after = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / after)
        if self.curve is not None:
            return self.curve(progress)
        if self.name == "cosine":
            return self.min_factor + (1 - self.min_factor) * _half_cosine(progress)
        if self.name == "linear":
            return self.min_factor + (1 - self.min_factor) * (1 - progress)
        if self.name == "step":
            return self.gamma ** (step // self.step_size)
        if self.name == "multistep":
            return self.gamma ** sum(step >= milestone for milestone in self.milestones)
        if self.name == "onecycle":
            return _one_cycle(step, self.total_steps)
        assert self.name == "constant", f"no factor for the schedule {self.name}"
        return 1.0

    def apply(self, optimizer, step: int) -> None:
        """Sets the rate of every parameter group for optimizer step `step` (from 0)."""
        factor = self.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor

    def observe(self, loss: float) -> bool:
        """Takes the validation loss, or another figure that shall fall, after each evaluation;
        returns whether the rate is lowered."""
        return False

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


@dataclass
class Plateau(Schedule):
    """Falls by `gamma` when the validation loss has not fallen for more than `patience`
    evaluations in a row, never below `min_factor`: PyTorch's ReduceLROnPlateau (mode min,
    relative threshold, no cooldown)."""

    patience: int = 5
    reduced: float = 1.0
    best: float = math.inf
    since_best: int = 0

    def after_warmup(self, step: float) -> float:
        return self.reduced

    def observe(self, loss: float) -> bool:
        margin = PLATEAU_THRESHOLD if self.best > 0 else -PLATEAU_THRESHOLD
        if loss < self.best * (1 - margin):
            self.best, self.since_best = loss, 0
            return False
        self.since_best += 1
        if self.since_best <= self.patience or self.reduced <= self.min_factor:
            return False
        self.reduced, self.since_best = max(self.reduced * self.gamma, self.min_factor), 0
        return True

    def state_dict(self) -> dict:
        best = self.best if math.isfinite(self.best) else None  # JSON has no infinity
        return {"reduced": self.reduced, "best": best, "since_best": self.since_best}

    def load_state_dict(self, state: dict) -> None:
        if state:
            self.reduced, self.since_best = state["reduced"], state["since_best"]
            self.best = math.inf if state["best"] is None else state["best"]


def _half_cosine(progress: float) -> float:
    """1 at progress 0, 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _one_cycle(step: float, total_steps: int) -> float:
    """From 1 / START_DIVISOR up to 1, then down to 1 / (START_DIVISOR * END_DIVISOR), by half
    cosines; the last step has the lowest rate."""
    start, end = 1 / START_DIVISOR, 1 / (START_DIVISOR * END_DIVISOR)
    top = RISE * total_steps - 1
    if step <= top:
        return 1 - (1 - start) * _half_cosine(step / top if top > 0 else 1.0)
    progress = (step - top) / max(1.0, total_steps - 1 - top)
    return end + (1 - end) * _half_cosine(min(1.0, progress))


def build_schedule(
    name: str,
    *,
    lr: float,
    total_steps: int,
    steps_per_epoch: int,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    gamma: float = 0.1,
    step_epochs: float | None = None,
    milestones: list[float] | None = None,
    plateau_patience: int = 5,
    per_epoch: bool = False,
    warmup_lr: float | None = None,
) -> Schedule:
    """The schedule `name` (a key of SCHEDULES, or FILE.py:NAME), some of its lengths in epochs.

    Args:
        lr, min_lr: peak and lowest learning rate.
        total_steps: optimizer steps of the schedule, with the warm-up.
        step_epochs: of "step"; None: a third of the schedule.
        milestones: of "multistep", in epochs; None: after a half and three quarters of the schedule
            (He et al., "Deep residual learning" (2016), section 4.2).
        plateau_patience: of "plateau", in evaluations.
        per_epoch: the rate changes between epochs alone.
        warmup_lr: the learning rate of the first step of the warm-up.
    """
    step_size = total_steps / 3 if step_epochs is None else step_epochs * steps_per_epoch
    borders = (
        [total_steps * fraction for fraction in (0.5, 0.75)]
        if milestones is None
        else [epoch * steps_per_epoch for epoch in milestones]
    )
    values: dict = {
        "name": name,
        "total_steps": total_steps,
        "warmup_steps": warmup_steps,
        "min_factor": min_lr / lr,
        "gamma": gamma,
        "step_size": max(1, round(step_size)),
        "milestones": tuple(round(border) for border in borders),
        "epoch_steps": steps_per_epoch if per_epoch else None,
        "warmup_start": None if warmup_lr is None else warmup_lr / lr,
        "stretches": {"step": step_epochs, "multistep": milestones}.get(name) is None,
        "curve": own_curve(name) if ":" in name else None,
    }
    return Plateau(**values, patience=plateau_patience) if name == "plateau" else Schedule(**values)


def own_curve(place: str) -> Callable[[float], float]:
    """The function that "path/to/file.py:name" names. It, and this, raise UserError if its answer
    is no factor."""
    function = user_files.find("--sched", place, "function", "my_schedule", callable)

    def curve(progress: float) -> float:
        call, takes = f"--sched {place}({progress:g})", "it takes a number from 0 to 1"
        factor = user_files.attempt(lambda: float(function(progress)), call, place, takes)
        if not 0 <= factor < math.inf:
            raise UserError(
                f"--sched {place}({progress:g}) is {factor:g}, not a factor of --lr, 0 or more"
            )
        return factor

    for progress in (0.0, 0.5, 1.0):
        curve(progress)
    return curve
