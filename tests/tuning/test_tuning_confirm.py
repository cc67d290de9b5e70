"""Which trial becomes the recipe."""

import math
from types import SimpleNamespace

import pytest
from optuna.trial import TrialState

from tuning.confirm import Confirmation, judge, standard_error
from tuning.runner import Outcome

SAMPLES = 5000


def confirmation(first: dict[int, float], confirm=2, default_state=TrialState.COMPLETE):
    """A Confirmation of trials with these scores, two stages and the seed 0."""
    trials = [
        SimpleNamespace(
            number=number,
            state=TrialState.COMPLETE if number else default_state,
            user_attrs={"rung1": {"score": score, "val_samples": SAMPLES}} if score else {},
        )
        for number, score in first.items()
    ]
    search = SimpleNamespace(
        study=SimpleNamespace(trials=lambda: trials, values=lambda trial: {"lr": trial.number}),
        recipe=SimpleNamespace(rungs=[None, None], val_fraction=0.2),
        settings=SimpleNamespace(confirm=confirm),
        seed=0,
        console=SimpleNamespace(say=lambda line: None),
    )
    rivals = sorted((n for n in first if n), key=lambda n: -first[n])
    return Confirmation(search, rivals)


def told(made: Confirmation, again: dict[int, list]):
    """The verdict after these scores of the further seeds; a word is a failure."""
    for number, scores in again.items():
        for seed, score in enumerate(scores, 1):
            failed = isinstance(score, str)
            outcome = Outcome(failure=score) if failed else Outcome(score, SAMPLES, 100.0, 1, 1.0)
            made.outcomes[number, seed] = outcome
    assert set(made.outcomes) == set(made.items)
    return made.verdict()


def test_the_better_finalist_is_compared_by_the_further_seeds():
    made = confirmation({0: 48.0, 3: 49.0, 5: 50.0, 8: 48.9})
    assert made.finalists == [5, 3]
    assert set(made.items) == {(n, seed) for n in (0, 3, 5) for seed in (1, 2)}
    verdict = told(made, {0: [45.0, 46.0], 5: [46.0, 45.5], 3: [48.0, 47.0]})
    assert verdict.number == 3 and verdict.difference == pytest.approx(2.0)
    assert verdict.scores == {0: [45.0, 46.0], 5: [46.0, 45.5], 3: [48.0, 47.0]}
    assert "trial 3 has 47.50 %, the default recipe 45.50 %" in verdict.lines[0]
    assert verdict.lines[1].startswith("trial 5, the other finalist, has 45.75 % (")
    # The score by the search's own seed, which chose the trial, does not count.
    stands = told(confirmation({0: 40.0, 3: 42.0}), {0: [45.0, 45.0], 3: [44.0, 44.5]})
    assert stands.number == 0 and stands.difference == -0.75 and "not with the" in stands.lines[1]


def test_only_trials_near_the_best_are_trained_again():
    assert confirmation({0: 40.0, 3: 60.0, 5: 45.0}).finalists == [3]
    far = confirmation({0: 60.0, 3: 45.0, 5: 40.0})
    assert far.finalists == far.items == []
    verdict = far.verdict()
    assert verdict.number == 0 and "with the seed of the search alone" in verdict.lines[0]
    assert confirmation({0: 98.0, 3: 100.0, 5: 99.8}).finalists == [3, 5]
    none = confirmation({0: 48.0, 3: 48.5}, confirm=0).verdict()
    assert none.number == 3 and none.within_noise and none.scores == {}


def test_a_trial_that_fails_is_not_the_recipe():
    first = {0: 48.0, 3: 49.0, 5: 50.0}
    again = {0: [45.0, 45.0], 3: [46.0, 46.0], 5: [50.0, "not finite"]}
    verdict = told(confirmation(first), again)
    assert verdict.number == 3
    assert "with another seed trial 5 has failed (not finite)" in verdict.lines
    both = told(confirmation(first), again | {3: ["diverged", 46.0]})
    assert both.number == 0 and both.lines[-1] == "best.yaml is the default recipe"
    default = told(confirmation(first), again | {0: [45.0, "killed"]})
    assert default.number == 3 and "trial 3 takes its place" in default.lines[-1]


def test_the_verdict_without_a_default_or_a_rival():
    alone = confirmation({0: 48.0}).verdict()
    assert alone.number == 0 and "no other trial has finished" in alone.lines[0]
    nothing = confirmation({0: None}).verdict()
    assert nothing.number == 0 and "no trial has finished" in nothing.lines[0]
    failed = confirmation({0: None, 3: 30.0}, default_state=TrialState.FAIL)
    assert failed.items == []
    assert failed.verdict().number == 3 and "has failed" in failed.verdict().lines[0]


def test_standard_error():
    half = standard_error([(50.0, 50.0)], [1000])
    assert half == pytest.approx(100 * math.sqrt(2 * 0.25 / 1000))
    assert standard_error([(50.0, 50.0)] * 4, [1000] * 4) == pytest.approx(half / 2)
    # More seeds evaluate the same samples, and do not add any.
    assert standard_error([(50.0, 50.0)] * 4, [1000] * 4, shared=True) == pytest.approx(half)
    wide = standard_error([(60.0, 50.0), (40.0, 50.0)], [1000, 1000])
    assert wide == pytest.approx(20 / math.sqrt(2) / math.sqrt(2))


def test_verdicts_say_whether_a_difference_may_be_chance():
    taken = judge(7, [(80.0, 70.0), (81.0, 70.5)], [2000, 2000], "over 2 seeds")
    assert taken.number == 7 and not taken.within_noise
    assert "over 2 seeds: trial 7 has 80.50 %, the default recipe 70.25 %, +10.25" in taken.lines[0]
    close = judge(7, [(70.6, 70.0)], [2000], "x")
    assert close.number == 7 and close.within_noise and "within noise" in close.lines[-1]
    perfect = judge(7, [(100.0, 100.0)], [2000], "x")
    assert perfect.number == 0 and perfect.within_noise
    chance = judge(7, [(69.0, 70.0)], [2000], "x", was_better=True)
    assert chance.number == 0 and "not with the further seeds" in chance.lines[1]
