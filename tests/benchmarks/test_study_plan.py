"""benchmarks/study: the search and the figures as pure functions."""

import dataclasses
import math

import pytest

from benchmarks.study.plan import (
    Case,
    Optimizer,
    Plan,
    Result,
    Run,
    epochs_to_target,
    final_runs,
    finished_runs,
    next_positions,
    next_runs,
    on_grid,
    search,
)
from benchmarks.study.summary import summarize

SGD = Optimizer("sgd", "sgd", (), lr=0.1, weight_decay=5e-4)


# ---- the search -------------------------------------------------------------------------------
def measured(scores: dict[int, float], budget: int, value) -> list[int]:
    """The positions that a search measures, in order."""
    order = list(scores)
    while positions := next_positions(scores, budget):
        scores |= {position: value(position) for position in positions}
        order += positions
    return order


def test_grid_is_quarter_decades_to_two_digits():
    assert [on_grid(0.1, p) for p in (-2, 0, 1, 2, 4)] == [0.032, 0.1, 0.18, 0.32, 1.0]


@pytest.mark.parametrize(
    ("best", "order"),
    [
        (0, [0, 2, -2, 1, -1]),  # inside: halfway to both neighbours, the better one first
        (-0.4, [0, 2, -2, -1, 1]),
        (4, [0, 2, -2, 4, 6]),  # outward as long as the best lies at the edge
        (2.2, [0, 2, -2, 4, 3]),
        (-9, [0, 2, -2, -4, -6]),
    ],
)
def test_search_moves_to_the_best(best, order):
    assert measured({}, 5, lambda position: -abs(position - best - 0.01)) == order


def test_search_keeps_its_budget():
    for budget in range(1, 12):
        order = measured({}, budget, lambda position: -abs(position - 0.6))
        assert len(order) == len(set(order)) == budget


def test_search_leaves_rates_that_diverge():
    value = lambda position: -math.inf if position > -3 else float(position)  # noqa: E731
    assert measured({}, 6, value) == [0, 2, -2, -4, -6, -5]
    assert measured({}, 5, lambda position: -math.inf) == [0, 2, -2, -4, -6]


def test_search_goes_on_outward_when_all_around_the_best_is_measured():
    order = measured({}, 8, lambda position: -abs(position - 0.1))
    assert order == [0, 2, -2, 1, -1, 4, -4, 6]


def play(cases, plan, accuracy) -> dict[Run, Result]:
    """A whole study with made-up accuracies."""
    results = {}
    while runs := next_runs(cases, plan, results):
        run = runs[-1]
        assert run not in results
        results[run] = Result(accuracy(run), 1.0, 1.0)
    return results


def test_tuning_takes_learning_rates_first_then_weight_decays():
    plan, case = Plan(epochs=8, trials=8, seeds=2), Case(SGD, 128)
    results = play([case], plan, lambda r: 50 - abs(r.lr - 0.3) - abs(r.weight_decay - 0.005))
    found = search(case, plan, results)
    assert len(results) == plan.runs == 8 + 2 * 3
    assert [run.lr for run in found.lr_trials] == [0.032, 0.1, 0.18, 0.32, 1.0]
    assert {run.weight_decay for run in found.lr_trials} == {5e-4}
    assert not found.lr_at_edge
    assert {run.lr for run in found.decay_trials} == {0.32}
    assert [run.weight_decay for run in found.decay_trials] == [0.00016, 0.0005, 0.0016, 0.005]
    assert found.decay_at_edge
    best = found.best(results)
    assert (best.lr, best.weight_decay) == (0.32, 0.005)
    tuning = [run for run in results if run.split == "val"]
    assert {(run.epochs, run.seed) for run in tuning} == {(4, 0)} and len(tuning) == 8
    assert set(final_runs(case, plan, best)) == {run for run in results if run.split == "test"}
    assert {(run.epochs, run.seed) for run in results if run.split == "test"} == {
        (epochs, seed) for epochs in (4, 6, 8) for seed in (1, 2)
    }


def test_tuning_does_not_depend_on_test_pictures():
    plan, case = Plan(trials=6), Case(SGD, 128)

    def accuracy(run):
        return -abs(run.lr - 0.1) if run.split == "val" else 10 * run.lr

    results = play([case], plan, accuracy)
    assert {run.lr for run in results if run.split == "test"} == {0.1}


def test_every_optimizer_has_the_same_budget_whatever_its_results():
    plan = Plan(trials=8)
    other = dataclasses.replace(SGD, label="adamw", name="adamw", lr=1e-3, weight_decay=0.0)
    cases = [Case(one, batch) for batch in (128, 1024) for one in (SGD, other)]
    results = play(cases, plan, lambda run: None if run.label == "sgd" else run.lr)
    for case in cases:
        own = [r for r in results if (r.label, r.batch) == (case.optimizer.label, case.batch)]
        assert len(own) == plan.runs
        assert set(finished_runs([case], plan, results)) == set(own)
        assert search(case, plan, results).lr_at_edge
    assert not any(run.weight_decay for run in results if run.label == "adamw")


def test_centre_grows_with_the_root_of_the_batch():
    assert Case(SGD, 128).lr == 0.1 and Case(SGD, 1024).lr == 0.28


def test_a_study_that_was_stopped_asks_for_the_same_runs():
    plan, cases = Plan(trials=6, seeds=1), [Case(SGD, 128)]
    accuracy = lambda run: -abs(run.lr - 0.5)  # noqa: E731
    whole = play(cases, plan, accuracy)
    for kept in range(len(whole)):
        results = dict(list(whole.items())[:kept])
        while runs := next_runs(cases, plan, results):
            results[runs[0]] = Result(accuracy(runs[0]), 1.0, 1.0)
        assert results == whole


# ---- the figures ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("accuracies", "target", "expected"),
    [
        ([40, 50, 60], 55, (10.5, "interpolated")),
        ([40, 50, 60], 50, (9, "interpolated")),
        ([40, 50, 60], 60, (12, "interpolated")),
        ([40, 50, 60], 40, (6, "at most")),
        ([40, 50, 60], 10, (6, "at most")),
        ([40, 50, 60], 60.1, (None, "not reached")),
        ([40, 52, 48], 46, (7.5, "interpolated")),  # the first crossing
        ([40, 38, 48], 43, (10.5, "interpolated")),
    ],
)
def test_epochs_to_target(accuracies, target, expected):
    assert epochs_to_target([6, 9, 12], accuracies, target) == expected


def test_summary_compares_with_the_first_optimizer():
    plan = Plan(epochs=8, fractions=(1.0, 0.5), trials=1, seeds=2)
    fast = dataclasses.replace(SGD, label="fast")
    lost = dataclasses.replace(SGD, label="lost")
    cases = [Case(one, 128) for one in (SGD, fast, lost)]

    def accuracy(run):
        if run.label == "lost" and run.split == "test" and run.seed == 2:
            return None
        return 40.0 + run.epochs * (2 if run.label == "fast" else 1) + run.seed

    speeds = {128: {"sgd": [100.0, 50.0], "fast": [50.0, 25.0], "lost": [100.0, 50.0]}}
    (batch,) = summarize(cases, plan, play(cases, plan, accuracy), speeds, samples=300)
    assert batch["baseline"] == "sgd" and batch["target_accuracy"] == 49.5
    sgd, fast, lost = batch["optimizers"].values()
    assert sgd["epochs_to_target"] == 8 and sgd["seconds_per_epoch"] == 300 / 75
    assert [length["epochs"] for length in sgd["lengths"]] == [4, 8]
    assert sgd["lengths"][1] | {"mean": 49.5, "min": 49, "max": 50} == sgd["lengths"][1]
    assert (fast["epochs_to_target"], fast["target"]) == (4, "at most")
    assert fast["time_per_epoch_relative"] == 2 and fast["seconds_to_target"] == 4 * 2 * 4
    assert lost["lengths"][0]["mean"] is None and lost["lengths"][0]["diverged"] == 1
    assert (lost["epochs_to_target"], lost["target"]) == (None, "not reached")
