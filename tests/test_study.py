"""benchmarks/study: the search and the figures as pure functions, and one tiny study."""

import dataclasses
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until

from benchmarks.study import __main__ as entry
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
from benchmarks.study.pool import Processes
from benchmarks.study.store import Store
from benchmarks.study.summary import summarize
from benchmarks.study.train import Bench, Setting
from utils.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
SMALLEST = [
    "--optimizers", "sgd,adamw", "--batches", "64", "--epochs", "1", "--fractions", "0.5", "1",
    "--trials", "3", "--seeds", "1", "--train_samples", "128", "--val_samples", "30",
    "--test_samples", "30", "--width", "4", "--timing_steps", "1", "--timing_repetitions", "1",
]  # fmt: skip
SETTING = Setting(None, Path(".cache"), 128, 30, 30, 4, "fp32", "cpu", 1)
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


def test_search_flees_from_rates_that_diverge():
    value = lambda position: -math.inf if position > -3 else float(position)  # noqa: E731
    assert measured({}, 6, value) == [0, 2, -2, -4, -6, -5]
    assert measured({}, 5, lambda position: -math.inf) == [0, 2, -2, -4, -6]


def test_search_goes_on_outward_when_all_is_measured_around_the_best():
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
    best = found.best(results)
    assert (best.lr, best.weight_decay) == (0.32, 0.005)
    tuning = [run for run in results if run.split == "val"]
    assert {(run.epochs, run.seed) for run in tuning} == {(4, 0)} and len(tuning) == 8
    assert set(final_runs(case, plan, best)) == {run for run in results if run.split == "test"}
    assert {(run.epochs, run.seed) for run in results if run.split == "test"} == {
        (epochs, seed) for epochs in (4, 6, 8) for seed in (1, 2)
    }


def test_test_pictures_have_no_say_in_the_tuning():
    plan, case = Plan(trials=6), Case(SGD, 128)

    def accuracy(run):
        return -abs(run.lr - 0.1) if run.split == "val" else 10 * run.lr

    results = play([case], plan, accuracy)
    assert {run.lr for run in results if run.split == "test"} == {0.1}


def test_every_optimizer_has_the_same_budget_whatever_comes_out():
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


def test_a_study_that_was_stopped_wants_the_same_runs():
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


# ---- one tiny study ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    assert entry.main([*SMALLEST, "--output", str(folder)]) == 0
    return folder


def test_study_makes_its_files(finished):
    records = [json.loads(line) for line in (finished / "results.jsonl").open()]
    assert [record["kind"] for record in records].count("timing") == 1
    assert [record["kind"] for record in records].count("run") == 2 * (3 + 2)
    (batch,) = json.loads((finished / "summary.json").read_text())["batches"]
    assert list(batch["optimizers"]) == ["sgd", "adamw"]
    for figures in batch["optimizers"].values():
        assert all(0 <= length["mean"] <= 100 for length in figures["lengths"])
        assert figures["seconds_per_epoch"] > 0
    table = (finished / "table.md").read_text()
    assert "synthetic" in table and "| sgd | 0" in table and "| adamw | 0" in table
    for name in ("accuracy.png", "learning_rates.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")


def test_restart_trains_only_what_is_missing(finished, tmp_path, monkeypatch, capsys):
    lines = (finished / "results.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["result"]
    # The last line was cut off by a kill.
    (tmp_path / "results.jsonl").write_text("".join(lines[:-1]) + lines[-1][:40])
    trained = []
    train = Bench.train
    monkeypatch.setattr(Bench, "train", lambda self, run: trained.append(run) or train(self, run))
    monkeypatch.setattr(Bench, "speeds", None)  # is not measured again either
    assert entry.main([*SMALLEST, "--output", str(tmp_path)]) == 0
    assert len(trained) == 1 and "10 runs, 9 of them done" in capsys.readouterr().out
    again = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])["result"]
    assert again | {"seconds": 0} == last | {"seconds": 0}
    # The tuning is the same with other test pictures; the final runs are not.
    trained.clear()
    assert entry.main([*SMALLEST, "--test_samples", "20", "--output", str(tmp_path)]) == 0
    assert [run.split for run in trained] == ["test"] * 4


def test_a_run_that_diverges_is_a_result(monkeypatch):
    bench = Bench(SETTING)
    run = Case(SGD, 64).run(4, 1e30, 0.0, 0, "val")
    result = bench.train(run)
    assert result.accuracy is None and result.train_loss is None and result.seconds > 0


def test_splits_have_no_picture_in_common():
    bench = Bench(dataclasses.replace(SETTING, train_samples=3000, val_samples=2000))
    train, val = bench.splits["train"], bench.splits["val"]
    assert not set(train.rows) & set(val.rows) and len(train) == 3000 and len(val) == 2000
    assert {int((train.labels == label).sum()) for label in range(10)} == {300}
    with pytest.raises(UserError, match="lower --train_samples"):
        Bench(dataclasses.replace(SETTING, train_samples=4990))


@pytest.mark.slow
def test_processes_train_the_same_and_end():
    runs = [Case(SGD, 64).run(1, lr, 5e-4, 1, "val") for lr in (0.01, 0.1)]
    others = {*multiprocessing.active_children()}  # of other tests in this process
    with Processes(SETTING, 2) as processes:
        processes.start(runs)
        assert processes.running == runs
        found = dict(processes.wait() for _ in runs)
        assert processes.running == []
        children = [*{*multiprocessing.active_children()} - others]
        assert len(children) >= 2
        children[0].kill()
        children[0].join()
        with pytest.raises(UserError, match="ended with code -9"):
            processes.start([runs[0], runs[1]])
            processes.wait(), processes.wait()
    assert not {*multiprocessing.active_children()} - others
    bench = Bench(SETTING)
    for run in runs:
        assert found[run].accuracy == bench.train(run).accuracy


@pytest.mark.slow
@pytest.mark.parametrize("seen", [2, 3], ids=["while they start", "all have started"])
def test_an_interrupt_leaves_no_process(seen, tmp_path):
    arguments = [*SMALLEST, "--epochs", "500", "--jobs", "2", "--output", str(tmp_path)]
    study = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.study", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        # Even where these tests run in the background, which ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for line in study.stdout:
        if "runs, 0 of them done" in line:
            break
    children = Path(f"/proc/{study.pid}/task/{study.pid}/children")
    # Two of ours, and before them the one that multiprocessing tracks them with.
    wait_until(lambda: len(children.read_text().split()) >= seen, "too few processes")
    processes = [int(pid) for pid in children.read_text().split()]
    os.kill(study.pid, signal.SIGINT)
    _, said = study.communicate(timeout=PATIENCE)
    assert study.returncode == 130 and "goes on from the finished runs" in said
    assert "Traceback" not in said
    left = [Path(f"/proc/{pid}") for pid in processes]
    wait_until(lambda: not any(path.exists() for path in left), "a process is left")


# ---- the user's mistakes ----------------------------------------------------------------------


def test_variants_carry_their_settings():
    sgd, own = entry.parse_optimizers("sgd", ["heavy=sgd:momentum=0.95,lr=1e-2,decay_all=true"])
    assert sgd == Optimizer("sgd", "sgd", (), 0.1, 5e-4)
    assert own == Optimizer("heavy", "sgd", (("decay_all", True), ("momentum", 0.95)), 0.01, 5e-4)
    assert [entry.parse_value(text) for text in ("none", "3", "channels")] == [None, 3, "channels"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--optimizers", "sdg"], "unknown optimizer 'sdg': the optimizers are sgd, adamw"),
        (["--optimizers", ""], "name one or more"),
        (["--variant", "sgd=sgd:momentum=0.8"], "named twice"),
        (["--variant", "x=sgd:momentum"], "not KEY=VALUE"),
        (["--variant", "x=sgd:momentun=0.8"], "--variant x:"),
        (["--fractions", "0.5"], "1 must be among them"),
        (["--fractions", "1", "1.5"], "above 0 and up to 1"),
        (["--seeds", "0"], "--seeds must be above 0"),
        (["--batches", "1"], "at least 2"),
        (["--train_samples", "5000"], "lower --train_samples"),
    ],
)
def test_mistakes_are_one_line(flags, said, tmp_path, capsys):
    assert entry.main([*SMALLEST, "--output", str(tmp_path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


def test_a_strange_file_is_not_taken_for_results(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(UserError, match="line 1 is no record"):
        Store(tmp_path / "results.jsonl")
