"""What the study trains next, as pure functions of what it has trained so far.

A study stopped at any moment goes on from its finished runs alone, and with any number of
processes it trains the same runs. PyTorch is not needed here.
"""

import math
from dataclasses import dataclass

# In quarter decades: a coarse step is a factor of 3.2.
COARSE, FINE = 2, 1
TUNING_SEED = 0  # the final runs have the seeds 1, 2, 3, ...
WEIGHT_DECAY_FRACTION = 3 / 8  # of the trials search weight decays


@dataclass(frozen=True)
class Optimizer:
    """One line of the comparison: an optimizer of the factory, perhaps with own settings."""

    label: str
    name: str  # a key of OPTIMIZERS or OTHERS
    settings: tuple[tuple[str, object], ...]  # further arguments of build_optimizer
    lr: float  # centre of the search at a batch of 128
    weight_decay: float  # centre of the search; 0: none is searched


@dataclass(frozen=True)
class Run:
    """What identifies a run of a study."""

    label: str
    name: str
    settings: tuple[tuple[str, object], ...]
    batch: int
    epochs: float
    lr: float
    weight_decay: float
    seed: int
    split: str  # what its accuracy is measured on: "val" or "test"


@dataclass(frozen=True)
class Result:
    accuracy: float | None  # per cent; None: the run diverged
    train_loss: float | None  # mean over its last epoch
    seconds: float


@dataclass(frozen=True)
class Plan:
    """How much is trained: the same for each optimizer and batch size."""

    epochs: float = 10
    fractions: tuple[float, ...] = (0.5, 0.75, 1.0)  # of the epochs: lengths of the final runs
    trials: int = 6
    seeds: int = 3

    @property
    def tuning_epochs(self) -> float:
        return self.epochs / 2

    @property
    def lengths(self) -> list[float]:
        """Epochs of the final runs, the shortest first."""
        return sorted(self.epochs * fraction for fraction in self.fractions)

    @property
    def runs(self) -> int:
        """Of one optimizer at one batch size."""
        return self.trials + self.seeds * len(self.fractions)


Results = dict[Run, Result]


# ---- the search -------------------------------------------------------------------------------


def on_grid(centre: float, position: int) -> float:
    """The value `position` quarter decades above `centre`, to two digits."""
    return float(f"{centre * 10 ** (position / 4):.2g}")


def next_positions(scores: dict[int, float], budget: int) -> list[int]:
    """Where on the grid to measure next, given {position: score, higher is better} so far.

    First the centre and a coarse step to both sides, together. Then one at a time: outward while
    the best lies at an edge, else halfway to its neighbours, the better one first; when those are
    done, outward on the better side. Empty when `budget` positions have been measured. Of equal
    scores the lowest position counts as the best.
    """
    first = [position for position in (0, COARSE, -COARSE)[:budget] if position not in scores]
    if first or len(scores) >= budget:
        return first
    top, bottom = max(scores), min(scores)
    best = best_position(scores)
    if best == top:
        return [top + COARSE]
    if best == bottom:
        return [bottom - COARSE]
    above = min(position for position in scores if position > best)
    below = max(position for position in scores if position < best)
    sides = [(scores[above], best + FINE), (scores[below], best - FINE)]
    for _, position in sorted(sides, reverse=True):
        if position not in scores:
            return [position]
    return [top + COARSE if scores[top] >= scores[bottom] else bottom - COARSE]


def best_position(scores: dict[int, float]) -> int:
    return min(scores, key=lambda position: (-scores[position], position))


@dataclass(frozen=True)
class Case:
    """One optimizer at one batch size."""

    optimizer: Optimizer
    batch: int

    @property
    def lr(self) -> float:
        """Centre of the search: it grows with the square root of the batch, which lies between
        what is usual for SGD (in proportion) and what is for Adam; the search finds the rest."""
        return float(f"{self.optimizer.lr * math.sqrt(self.batch / 128):.2g}")

    def run(self, epochs: float, lr: float, weight_decay: float, seed: int, split: str) -> Run:
        one = self.optimizer
        return Run(
            one.label, one.name, one.settings, self.batch, epochs, lr, weight_decay, seed, split
        )


@dataclass(frozen=True)
class Search:
    """How far the tuning of a case has come."""

    wanted: list[Run]  # to train next; empty when it is over
    lr_trials: list[Run]  # done, at the centre's weight decay, by rising learning rate
    decay_trials: list[Run]  # done, at the best of these learning rates, by rising weight decay
    # The best one is the highest or lowest tried.
    lr_at_edge: bool
    decay_at_edge: bool = False

    def best(self, results: Results) -> Run:
        """The trial with the highest validation accuracy; of equal ones the one with
        the lowest learning rate, then weight decay."""
        done = {run: results[run] for run in (*self.lr_trials, *self.decay_trials)}
        return min(done, key=lambda run: (-score(done[run]), run.lr, run.weight_decay))


def score(result: Result) -> float:
    return -math.inf if result.accuracy is None else result.accuracy


def search(case: Case, plan: Plan, results: Results) -> Search:
    """Learning rates at the usual weight decay first, then weight decays at the best of them."""
    decay = case.optimizer.weight_decay
    decay_budget = int(plan.trials * WEIGHT_DECAY_FRACTION) if decay else 0

    def trial(lr: float, weight_decay: float) -> Run:
        return case.run(plan.tuning_epochs, lr, weight_decay, TUNING_SEED, "val")

    wanted, lr_runs, lr_scores = _line(
        lambda position: trial(on_grid(case.lr, position), decay),
        plan.trials - decay_budget,
        results,
    )
    at_edge = bool(lr_scores) and best_position(lr_scores) in (min(lr_scores), max(lr_scores))
    if wanted or not decay_budget:
        return Search(wanted, lr_runs, [], at_edge)
    lr = on_grid(case.lr, best_position(lr_scores))
    wanted, decay_runs, decay_scores = _line(
        lambda position: trial(lr, on_grid(decay, position)),
        decay_budget + 1,  # the centre is known already
        results,
    )
    ends = (min(decay_scores), max(decay_scores))
    decay_at_edge = len(decay_scores) > 1 and best_position(decay_scores) in ends
    return Search(wanted, lr_runs, decay_runs, at_edge, decay_at_edge)


def _line(run_at, budget: int, results: Results) -> tuple[list[Run], list[Run], dict[int, float]]:
    """Follows `next_positions` as far as `results` go: (wanted, done in order, their scores)."""
    scores: dict[int, float] = {}
    while positions := next_positions(scores, budget):
        known = {p: score(results[run_at(p)]) for p in positions if run_at(p) in results}
        scores |= known
        if len(known) < len(positions):
            break
    wanted = [run_at(p) for p in positions if p not in scores]
    return wanted, [run_at(p) for p in sorted(scores)], scores


def final_runs(case: Case, plan: Plan, best: Run) -> list[Run]:
    """The tuned case at every length with every seed, the longest runs first."""
    return [
        case.run(epochs, best.lr, best.weight_decay, seed, "test")
        for epochs in reversed(plan.lengths)
        for seed in range(1, plan.seeds + 1)
    ]


def next_runs(cases: list[Case], plan: Plan, results: Results) -> list[Run]:
    """All runs that can be trained now; empty when the study is complete."""
    runs = []
    for case in cases:
        found = search(case, plan, results)
        wanted = found.wanted or final_runs(case, plan, found.best(results))
        runs += [run for run in wanted if run not in results]
    return runs


def finished_runs(cases: list[Case], plan: Plan, results: Results) -> list[Run]:
    """The finished runs of these cases, whatever else `results` hold."""
    runs = []
    for case in cases:
        found = search(case, plan, results)
        # The best learning rate at the usual weight decay stands in both lists of trials.
        runs += dict.fromkeys([*found.lr_trials, *found.decay_trials])
        if not found.wanted:
            finals = final_runs(case, plan, found.best(results))
            runs += [run for run in finals if run in results]
    return runs


# ---- what is read off the results -------------------------------------------------------------


def epochs_to_target(
    epochs: list[float], accuracies: list[float], target: float
) -> tuple[float | None, str]:
    """Epochs of training after which `target` is reached, between neighbouring lengths by a
    straight line: (epochs, "interpolated"), (the shortest, "at most") where that reaches it
    already, or (None, "not reached"). `epochs` rise; the first crossing counts.
    """
    if accuracies[0] >= target:
        return epochs[0], "at most"
    for index in range(1, len(epochs)):
        low, high = accuracies[index - 1], accuracies[index]
        if high >= target:
            share = (target - low) / (high - low)
            return epochs[index - 1] + share * (epochs[index] - epochs[index - 1]), "interpolated"
    return None, "not reached"
