"""Successive halving: the stages (rungs) of a trial, and which trials come to the next one.

Li et al., "A system for massively parallel hyperparameter tuning" (2020): a trial goes on where it
is among the best 1 / reduction of all that have come as far. Every rung is a whole run with its
own schedule, on `reduction` times the samples of the one before: the root of that in epochs, and
what is missing to it in training data.
"""

from dataclasses import dataclass

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

# Trials of random settings before TPE learns from them.
STARTUP_TRIALS = 8
# The first trial, of the default recipe, which is never stopped.
DEFAULT_TRIAL = 0


@dataclass(frozen=True)
class Rung:
    """Epochs, and the training data as a fraction up to 1 or a number of samples."""

    epochs: int
    subset: float


def build_rungs(epochs: int, subset: float, number: int, reduction: int) -> list[Rung]:
    """From the shortest to `Rung(epochs, subset)`; fewer where two would be alike."""
    rungs = []
    for index in range(number):
        smaller = reduction ** (number - 1 - index)
        its_epochs = max(1, round(epochs / smaller**0.5))
        share = subset * epochs / smaller / its_epochs
        share = min(subset, max(1.0, round(share)) if subset > 1 else round(share, 6))
        if not rungs or rungs[-1] != Rung(its_epochs, share):
            rungs.append(Rung(its_epochs, share))
    return rungs


class Halving(optuna.pruners.BasePruner):
    """A pure function of what the trials have reported (step: number of the rung), so that a study
    that was killed decides as it would have."""

    def __init__(self, reduction: int):
        self.reduction = reduction

    def prune(self, study, trial) -> bool:
        rung = trial.last_step
        if rung is None or trial.number == DEFAULT_TRIAL:
            return False
        scores = sorted(
            (
                other.intermediate_values[rung]
                for other in study.get_trials(deepcopy=False)
                if rung in other.intermediate_values
            ),
            reverse=True,
        )
        keep = max(1, len(scores) // self.reduction)
        return trial.intermediate_values[rung] < scores[keep - 1]


class SeededSampler(BaseSampler):
    """TPE or random, drawn for each trial from (seed, its number): a study that was killed proposes
    what it would have.

    Args:
        name: "tpe"; anything else is random.
    """

    def __init__(self, name: str, seed: int):
        self.name, self.seed = name, seed
        self._samplers = {}

    def _of(self, trial) -> BaseSampler:
        if trial.number not in self._samplers:
            seed = (self.seed * 1_000_003 + trial.number) % 2**32
            if self.name == "tpe":
                made = TPESampler(
                    n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True,
                    seed=seed,
                )  # fmt: skip
            else:
                made = RandomSampler(seed=seed)
            self._samplers = {trial.number: made}
        return self._samplers[trial.number]

    def infer_relative_search_space(self, study, trial):
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study, trial, search_space):
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)
