"""The best trial and the default recipe once more, with seeds that chose nothing."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

from tuning.halving import DEFAULT_TRIAL
from tuning.runner import Outcome

WAIT_SECONDS = 0.5
# Standard errors by which a trial may be behind the default, with the seed of the search, and is
# confirmed all the same: seeds differ by more than the validation samples alone let one expect.
NEAR = 4


@dataclass(frozen=True)
class Verdict:
    """Which trial is handed over, and how sure that is.

    Attributes:
        number: of the trial; 0 is the default recipe.
        lines: for people.
        difference: of the best trial and the default, in points of accuracy; None: not known.
        error: its standard error.
        scores: {trial: accuracies with the further seeds}.
    """

    number: int
    lines: list[str]
    difference: float | None = None
    error: float | None = None
    scores: dict[int, list[float]] = field(default_factory=dict)

    @property
    def within_noise(self) -> bool:
        return self.difference is not None and abs(self.difference) < 2 * self.error


class Confirmation:
    """Args:
    search: a `tuning.search.Search` whose trials are done.
    best: number of the best trial beside the default that came to the last rung; None: none did.
    """

    def __init__(self, search, best: int | None):
        self.search, self.best = search, best
        frozen = {trial.number: trial for trial in search.study.trials()}
        self.default_failed = frozen[DEFAULT_TRIAL].state.name == "FAIL"
        self.first = {
            number: trial.user_attrs.get(f"rung{len(search.recipe.rungs) - 1}", {})
            for number, trial in frozen.items()
        }
        both = best is not None and frozen[DEFAULT_TRIAL].state.name == "COMPLETE"
        count = search.settings.confirm if both and self._is_near() else 0
        self.values = {
            number: search.study.values(frozen[number]) for number in (DEFAULT_TRIAL, best) if count
        }
        seeds = [search.seed + 1 + index for index in range(count)]
        self.items = [(number, seed) for seed in seeds for number in self.values]
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        if self.items:
            search.console.say(
                f"confirming trial {best} and the default recipe with {count} further seed(s)"
            )

    def _pair(self) -> tuple[list[tuple[float, float]], list[int]]:
        """(best, default), and validation samples, with the seed of the search."""
        best, default = self.first[self.best], self.first[DEFAULT_TRIAL]
        return [(best["score"], default["score"])], [best["val_samples"]]

    def _is_near(self) -> bool:
        ((best, default),), _ = self._pair()
        return best - default > -NEAR * standard_error(*self._pair())

    def work(self, slot: int) -> None:
        """Of one job: takes runs that nobody has, until all are done."""
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
        best, first = self.best, self.first
        if best is None:
            return Verdict(DEFAULT_TRIAL, ["no trial has come to its end: the default stands"])
        if "score" not in first[DEFAULT_TRIAL]:
            why = "has failed" if self.default_failed else "is not at its end"
            return Verdict(best, [f"the default recipe {why}; trial {best} takes its place"])
        if not self.items:
            return judge(best, *self._pair(), "with the seed of the search alone")
        seeds = sorted({seed for _, seed in self.items})
        for number in (best, DEFAULT_TRIAL):
            failed = [s for s in seeds if self.outcomes[number, s].failure is not None]
            if failed:
                other = DEFAULT_TRIAL if number == best else best
                who = f"trial {best}" if number == best else "the default recipe"
                what = "the default stands" if number == best else f"trial {best} takes its place"
                why = self.outcomes[number, failed[0]].failure
                return Verdict(other, [f"with seed {failed[0]} {who} has failed: {what} ({why})"])
        pairs = [
            (self.outcomes[best, seed].score, self.outcomes[DEFAULT_TRIAL, seed].score)
            for seed in seeds
        ]
        samples = [self.outcomes[best, seed].val_samples for seed in seeds]
        better = first[best]["score"] > first[DEFAULT_TRIAL]["score"]
        return judge(best, pairs, samples, f"over {len(seeds)} further seed(s)", better)


def judge(
    best: int,
    pairs: list[tuple[float, float]],
    samples: list[int],
    over: str,
    was_better: bool = False,
) -> Verdict:
    """Whether the best trial is handed over.

    Args:
        pairs: (best, default), accuracies in per cent, of each seed.
        samples: of the validation split, of each seed.
        was_better: the trial, with the seed of the search.
    """
    differences = [one - other for one, other in pairs]
    difference = statistics.mean(differences)
    error = standard_error(pairs, samples)
    means = [statistics.mean(scores) for scores in zip(*pairs, strict=True)]
    line = (
        f"{over}: trial {best} has {means[0]:.2f} %, the default recipe {means[1]:.2f} %, "
        f"{difference:+.2f} ± {error:.2f} points (standard error)"
    )
    lines = [line]
    taken = difference > 0
    if not taken:
        by_chance = "the default recipe stands: what was better in the search was so by chance"
        none = "no trial is better than the default recipe: it stands"
        lines.append(by_chance if was_better else none)
    if abs(difference) < 2 * error:
        lines.append("note: the difference is within noise (less than two standard errors)")
    scores = {best: [one for one, _ in pairs], DEFAULT_TRIAL: [other for _, other in pairs]}
    return Verdict(best if taken else DEFAULT_TRIAL, lines, difference, error, scores)


def standard_error(pairs: list[tuple[float, float]], samples: list[int]) -> float:
    """Of the mean difference, in points: the larger one of what the validation samples give, as
    two independent draws of them, and what the seeds show."""
    variances = [
        sum(p / 100 * (1 - p / 100) for p in pair) / count
        for pair, count in zip(pairs, samples, strict=True)
    ]
    error = 100 * math.sqrt(sum(variances)) / len(pairs)
    if len(pairs) < 2:
        return error
    differences = [one - other for one, other in pairs]
    return max(error, statistics.stdev(differences) / math.sqrt(len(pairs)))
