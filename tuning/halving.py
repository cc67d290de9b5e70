"""Successive halving: the stages (rungs) of a trial, and which trials come to the next one.

After Li et al., "A system for massively parallel hyperparameter tuning" (2020), ASHA: a trial that
has finished a stage waits, and the best waiting trial is promoted to the next stage as long as
fewer trials have been promoted than 1 / reduction of those that finished this one. (ASHA promotes
every trial that is among the best 1 / reduction at that moment: more, in a short search.) Every
rung is a whole run with its own schedule, on `reduction` times the samples of the one before:
epochs grow by the square root of that, and the training data by the rest. Optuna's pruner is not
used, since it can only stop a trial for good, and not resume one that waits.
"""

import zlib
from dataclasses import dataclass

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from utils.errors import UserError

# Trials with random settings before TPE takes over.
STARTUP_TRIALS = 8
# The first trial is of the default recipe, and reaches the last rung in any case.
DEFAULT_TRIAL = 0
# Attribute of a trial: the last rung that it may train.
ALLOWED = "allowed_rung"


@dataclass(frozen=True)
class Rung:
    """Epochs, and the training data as a fraction up to 1 or a number of samples."""

    epochs: int
    subset: float


def data_text(subset: float) -> str:
    """A fraction as "20 %", a number of samples as it is."""
    return f"{100 * subset:.3g} %" if subset <= 1 else f"{subset:,.0f}"


def build_rungs(epochs: int, subset: float, number: int, reduction: int) -> list[Rung]:
    """From the shortest to `Rung(epochs, subset)`; fewer if two would be equal."""
    rungs = []
    for index in range(number):
        smaller = reduction ** (number - 1 - index)
        its_epochs = max(1, round(epochs / smaller**0.5))
        part = subset * epochs / smaller / its_epochs
        part = min(subset, max(1.0, round(part)) if subset > 1 else round(part, 6))
        if not rungs or rungs[-1] != Rung(its_epochs, part):
            rungs.append(Rung(its_epochs, part))
    return rungs


def is_waiting(trial: FrozenTrial, rungs: int) -> bool:
    """Whether it has done all stages that it is allowed, but not the last of the `rungs`; after the
    last it counts as running until its end has been recorded."""
    done, allowed = trial.last_step, trial.user_attrs.get(ALLOWED, 0)
    if trial.state != TrialState.RUNNING or trial.number == DEFAULT_TRIAL or done is None:
        return False
    return allowed <= done < rungs - 1


def next_to_promote(
    trials: list[FrozenTrial], rungs: int, reduction: int, at_end: bool
) -> FrozenTrial | None:
    """The waiting trial that is promoted next, if there is one.

    Of n trials that have finished a rung, n // reduction are promoted, always the best that waits
    there, and later rungs come first. `at_end`, when nothing else is left to do, the best of a rung
    is promoted in any case, as it finished late or there were too few, unless a better one has
    been. The default, which is promoted anyway, is not counted.

    Args:
        trials: all of the study, whatever became of them; a pure function of what they reported,
            so that a killed study, continued, makes the same decisions.
        rungs: how many there are.
    """
    others = [trial for trial in trials if trial.number != DEFAULT_TRIAL]
    for rung in range(rungs - 2, -1, -1):
        done = [trial for trial in others if rung in trial.intermediate_values]
        done.sort(key=lambda one: (-one.intermediate_values[rung], one.number))
        promoted = sum(not _is_at(trial, rung) for trial in done)
        waiting = [one for one in done if is_waiting(one, rungs) and _is_at(one, rung)]
        sound = [one for one in done if one.state != TrialState.FAIL]
        if waiting and (promoted < len(done) // reduction or (at_end and waiting[0] is sound[0])):
            return waiting[0]
    return None


def _is_at(trial: FrozenTrial, rung: int) -> bool:
    """Whether this rung is the last one that it has done and is allowed."""
    return trial.last_step == rung and trial.user_attrs.get(ALLOWED, 0) <= rung


class SeededSampler(BaseSampler):
    """TPE or random, seeded for each trial by (seed, its number), for a setting that is drawn alone
    also by its name: a study that was killed, even within a proposal, goes on to propose the same.

    Args:
        name: "tpe"; "grid", whose trials have all of their settings, so that drawing one is a
            UserError; anything else is random.
    """

    def __init__(self, name: str, seed: int):
        self.name, self.seed = name, seed
        self._samplers = {}

    def _of(self, trial, setting: str = "") -> BaseSampler:
        key = trial.number, setting
        if key not in self._samplers:
            own = zlib.crc32(setting.encode())
            seed = (self.seed * 1_000_003 + trial.number + own) % 2**32
            if self.name == "tpe":
                made: BaseSampler = TPESampler(
                    n_startup_trials=STARTUP_TRIALS,
                    multivariate=True,
                    constant_liar=False,
                    seed=seed,
                )
            else:
                made = RandomSampler(seed=seed)
            self._samplers = {key: made}
        return self._samplers[key]

    def infer_relative_search_space(self, study, trial):
        return self._of(trial).infer_relative_search_space(_as_told(study, trial), trial)

    def sample_relative(self, study, trial, search_space):
        return self._of(trial).sample_relative(_as_told(study, trial), trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        if self.name == "grid":
            raise UserError(
                f"--sampler grid: trial {trial.number} of this study has no grid point of "
                f"{param_name}; start a new study with another --output"
            )
        told = _as_told(study, trial)
        sampler = self._of(trial, param_name)
        return sampler.sample_independent(told, trial, param_name, param_distribution)


def _as_told(study, trial) -> optuna.Study:
    """The study as the sampler sees it: trials that wait or train count as pruned, with their score
    so far, or as bad without one, so that two jobs do not try the same settings."""
    told = optuna.create_study(direction="maximize")
    for other in study.get_trials(deepcopy=False):
        if other.number == trial.number or not other.params:
            continue
        told.add_trial(
            optuna.trial.create_trial(
                state=other.state if other.state.is_finished() else TrialState.PRUNED,
                value=other.value,
                params=other.params,
                distributions=other.distributions,
                intermediate_values=other.intermediate_values,
            )
        )
    return told
