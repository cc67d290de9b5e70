"""benchmarks/study: a tiny study, and the user's mistakes."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until
from quick_runs import quick

from benchmarks.study import __main__ as entry
from benchmarks.study.plan import Case, Optimizer
from benchmarks.study.pool import Processes
from benchmarks.study.store import Store
from benchmarks.study.summary import differences
from benchmarks.study.train import Bench, Setting
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = [
    "--optimizers", "sgd,adamw", "--batches", "64", "--epochs", "1", "--fractions", "0.5", "1",
    "--trials", "3", "--seeds", "1", "--train_samples", "128", "--val_samples", "30",
    "--test_samples", "30", "--width", "4", "--timing_steps", "1", "--timing_repetitions", "1",
]  # fmt: skip
SETTING = Setting(None, Path(".cache"), 128, 30, 30, "resnet", 4, None, "fp32", "cpu", 1)
SGD = Optimizer("sgd", "sgd", (), lr=0.1, weight_decay=5e-4)


# ---- one tiny study ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    assert entry.main([*SMALLEST, "--output", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_a_study_makes_its_files(finished):
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


@pytest.mark.slow
def test_a_restart_trains_only_what_is_missing(finished, tmp_path, monkeypatch, capsys):
    lines = (finished / "results.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["result"]
    # The last line was cut off by a kill.
    (tmp_path / "results.jsonl").write_text("".join(lines[:-1]) + lines[-1][:40])
    trained = []
    train = Bench.train
    monkeypatch.setattr(Bench, "train", lambda self, run: trained.append(run) or train(self, run))
    monkeypatch.setattr(Bench, "speeds", None)  # speeds are not measured again either
    assert entry.main([*SMALLEST, "--output", str(tmp_path)]) == 0
    assert len(trained) == 1 and "10 runs, 9 of them done" in capsys.readouterr().out
    again = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])["result"]
    assert again | {"seconds": 0} == last | {"seconds": 0}
    # The tuning is the same with other test pictures; the final runs are not.
    trained.clear()
    assert entry.main([*SMALLEST, "--test_samples", "20", "--output", str(tmp_path)]) == 0
    assert [run.split for run in trained] == ["test"] * 4


def test_a_vit_takes_steps_of_accumulated_micro_batches():
    """They are the steps of whole batches."""
    case, found = Case(Optimizer("lamb", "lamb", (), lr=0.01, weight_decay=0.02), 48), []
    for micro_batch in (None, 16):
        bench = Bench(dataclasses.replace(SETTING, model="vit", width=8, micro_batch=micro_batch))
        assert len(list(bench.loader("train", 48).epoch())) == (8 if micro_batch else 3)
        found.append(bench.train(case.run(1, 0.01, 0.02, 1, "val")))
    assert bench.speeds([case], 1, 1)["lamb"][0] > 0
    assert found[1].train_loss == pytest.approx(found[0].train_loss, rel=1e-4)


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
def test_several_processes_train_the_same_and_end(monkeypatch):
    quick(monkeypatch)  # as the processes are
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
def test_variants_have_their_settings():
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
        (["--micro_batch", "1"], "at least 2"),
        (["--model", "vit", "--width", "6"], "--model vit: dim must be a multiple of heads"),
        (["--train_samples", "5000"], "lower --train_samples"),
    ],
)
def test_mistakes_are_reported_in_one_line(flags, said, tmp_path, capsys):
    assert entry.main([*SMALLEST, "--output", str(tmp_path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


def test_an_optimizer_of_another_package_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert entry.main([*SMALLEST, "--output", str(tmp_path), "--optimizers", "soap"]) == 2
    assert "pip install pytorch_optimizer" in capsys.readouterr().err


def test_differences_are_taken_seed_by_seed():
    def figures(*accuracies):
        return {"lengths": [{"epochs": 5, "accuracies": accuracies, "diverged": 0}]}

    batch = {"baseline": "sgd", "optimizers": {"sgd": figures(2, 3, 4), "ngd": figures(3, 5, 7)}}
    assert "| ngd | +2.00 ± 2.48 |" in differences(batch)  # 4.303 / sqrt(3)
    assert differences({"baseline": "sgd", "optimizers": {"sgd": figures(2, 3, 4)}}) == ""


def test_a_strange_file_is_not_taken_for_results(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(UserError, match="line 1 is no record"):
        Store(tmp_path / "results.jsonl")
