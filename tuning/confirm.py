"""Trains the best trials and the default recipe again, with seeds that the search did not use.

The same seeds choose the better of the two finalists and compare it with the default, so its
accuracy looks a little too good; the report says so.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field, replace

from utils.plural import counted

from .halving import DEFAULT_TRIAL
from .runner import Outcome

WAIT_SECONDS = 0.5
# Trials that are confirmed, besides the default.
FINALISTS = 2
# A trial is confirmed unless it is more than this many standard errors behind with the search's
# seed. The limit is wide, as seeds differ by more than the number of validation samples explains.
NEAR = 4


@dataclass(frozen=True)
class Verdict:
    """Which trial becomes the recipe, and how sure that is.

    Attributes:
        number: of the trial; 0 is the default recipe.
        lines: what the user is told.
        difference: of the finalist and the default, in points of the score; None: not known.
        error: its standard error.
        scores: {trial: scores with the further seeds}.
    """

    number: int
    lines: list[str]
    difference: float | None = None
    error: float | None = None
    scores: dict[int, list[float]] = field(default_factory=dict)

    @property
    def within_noise(self) -> bool:
        return self.difference is not None and abs(self.difference) <= 2 * self.error


class Confirmation:
    """Args:
    search: a `tuning.search.Search` whose trials are done.
    rivals: numbers of the trials, other than the default, that did the last rung, best first.
    """

    def __init__(self, search, rivals: list[int]):
        self.search, self.rivals = search, rivals
        frozen = {trial.number: trial for trial in search.study.trials()}
        self.default_failed = frozen[DEFAULT_TRIAL].state.name == "FAIL"
        self.first = {
            number: trial.user_attrs.get(f"rung{len(search.recipe.rungs) - 1}", {})
            for number, trial in frozen.items()
        }
        comparable = frozen[DEFAULT_TRIAL].state.name == "COMPLETE" and search.settings.confirm
        ahead = [DEFAULT_TRIAL, *rivals[:1]]
        self.finalists = [
            number
            for number in (rivals[:FINALISTS] if comparable else [])
            if all(self._is_near(number, other) for other in ahead)
        ]
        tried = [DEFAULT_TRIAL, *self.finalists] if self.finalists else []
        self.values = {number: search.study.values(frozen[number]) for number in tried}
        self.seeds = [search.seed + 1 + index for index in range(search.settings.confirm)]
        self.items = [(number, seed) for seed in self.seeds for number in tried]
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        if self.items:
            search.console.say(
                f"confirming {' and '.join(f'trial {n}' for n in self.finalists)} and the default "
                f"recipe with {counted(len(self.seeds), 'further seed')}"
            )

    def _first_pair(self, one: int, other: int) -> tuple[list[tuple[float, float]], list[int]]:
        """Scores, and validation samples, with the seed of the search."""
        pair = self.first[one]["score"], self.first[other]["score"]
        return [pair], [self.first[one]["val_samples"]]

    def _is_near(self, one: int, other: int) -> bool:
        """Whether the first may be the better one, within the error of their scores."""
        pairs, samples = self._first_pair(one, other)
        return pairs[0][0] - pairs[0][1] >= -NEAR * standard_error(pairs, samples)

    def work(self, slot: int) -> None:
        """The work of one job: takes runs that no other process has, one after another, until all
        are done."""
        search = self.search
        while not search.runner.stopping.is_set():
            left = [item for item in self.items if item not in self.outcomes]
            if not left:
                return
            for number, seed in left:
                with search.study.confirmation(f"{number:04}-seed{seed}") as (folder, lock):
                    if lock is None or (number, seed) in self.outcomes:
                        continue
                    settings = search.recipe.of_trial(
                        self.values[number], search.recipe.rungs[-1], seed
                    )
                    outcome = search.runner.run(folder / "run", settings, slot, lock)
                    self.outcomes[number, seed] = outcome
                    break
            else:
                time.sleep(WAIT_SECONDS)

    def verdict(self) -> Verdict:
        if not self.rivals:
            other = "other " if "score" in self.first[DEFAULT_TRIAL] else ""
            return Verdict(
                DEFAULT_TRIAL, [f"no {other}trial has finished: best.yaml is the default recipe"]
            )
        best = self.rivals[0]
        if "score" not in self.first[DEFAULT_TRIAL]:
            why = "has failed" if self.default_failed else "has not finished"
            return Verdict(best, [f"the default recipe {why}; trial {best} takes its place"])
        if not self.items:
            pair = self._first_pair(best, DEFAULT_TRIAL)
            return judge(best, *pair, "with the seed of the search alone")
        failed = {number: outcome.failure for (number, _), outcome in self.outcomes.items()
                  if outcome.failure is not None}  # fmt: skip
        left = [number for number in self.finalists if number not in failed]
        lines = [f"with another seed trial {n} has failed ({failed[n]})"
                 for n in self.finalists if n in failed]  # fmt: skip
        if not left:
            return Verdict(DEFAULT_TRIAL, [*lines, "best.yaml is the default recipe"])
        # The scores of the search chose these finalists, so they may decide between them, but would
        # flatter them against the default.
        best = max(left, key=lambda n: statistics.mean([self.first[n]["score"], *self._again(n)]))
        if DEFAULT_TRIAL in failed:
            why = f"with another seed the default recipe has failed ({failed[DEFAULT_TRIAL]})"
            return Verdict(best, [*lines, f"{why}; trial {best} takes its place"])
        lines += [
            f"trial {n}, the other finalist, has {statistics.mean(self._again(n)):.2f} % (choosing "
            "the better of two flatters it a little)"
            for n in left
            if n != best
        ]
        pairs = list(zip(self._again(best), self._again(DEFAULT_TRIAL), strict=True))
        samples = [self.outcomes[best, seed].val_samples for seed in self.seeds]
        better = self.first[best]["score"] > self.first[DEFAULT_TRIAL]["score"]
        over = f"over {counted(len(self.seeds), 'further seed')}"
        shared = self.search.recipe.val_fraction is None
        verdict = judge(best, pairs, samples, over, better, shared)
        scores = {number: self._again(number) for number in (DEFAULT_TRIAL, *left)}
        first, *rest = verdict.lines
        return replace(verdict, lines=[first, *lines, *rest], scores=scores)

    def _again(self, number: int) -> list[float]:
        """Its scores with the further seeds."""
        return [self.outcomes[number, seed].score for seed in self.seeds]


def judge(
    best: int,
    pairs: list[tuple[float, float]],
    samples: list[int],
    over: str,
    was_better: bool = False,
    shared: bool = False,
) -> Verdict:
    """Whether the best trial becomes the recipe.

    Args:
        pairs: (best, default), scores in per cent, of each seed.
        samples: of the validation split, of each seed.
        was_better: the trial, with the seed of the search.
        shared: the validation samples are the same for every seed.
    """
    differences = [one - other for one, other in pairs]
    difference = statistics.mean(differences)
    error = standard_error(pairs, samples, shared)
    means = [statistics.mean(scores) for scores in zip(*pairs, strict=True)]
    line = (
        f"{over}: trial {best} has {means[0]:.2f} %, the default recipe {means[1]:.2f} %, "
        f"{difference:+.2f} ± {error:.2f} points (standard error)"
    )
    lines = [line]
    taken = difference > 0
    if not taken:
        again = "the trial was better in the search, but not with the further seeds"
        why = again if was_better else "no trial is better"
        lines.append(f"best.yaml is the default recipe: {why}")
    if abs(difference) <= 2 * error:
        lines.append("note: the difference is within noise (two standard errors or less)")
    return Verdict(best if taken else DEFAULT_TRIAL, lines, difference, error)


def standard_error(
    pairs: list[tuple[float, float]], samples: list[int], shared: bool = False
) -> float:
    """Standard error of the mean difference, in points: the larger one of what the validation
    samples give, as two independent draws of them for each seed (`shared`: for all seeds), and what
    the seeds show. Scores count as shares of the samples, which only accuracies are.
    """
    variances = [
        sum(max(0.0, p / 100 * (1 - p / 100)) for p in pair) / count
        for pair, count in zip(pairs, samples, strict=True)
    ]
    error = 100 * math.sqrt(statistics.mean(variances) / (1 if shared else len(pairs)))
    if len(pairs) < 2:
        return error
    differences = [one - other for one, other in pairs]
    return max(error, statistics.stdev(differences) / math.sqrt(len(pairs)))
