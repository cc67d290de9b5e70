"""Runs that fail early, branch off, or run out of memory leave a sound state."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from resnet50_test import main
from utils.checkpoints.checkpoint import Checkpoints
from utils.training.average import Average
from utils.training.objective import Classification
from utils.training.progress import Progress

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [
    "--dataset", "shapes", "--subset", "64", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--bs", "16",
]  # fmt: skip
STEPS = 4  # in an epoch


@pytest.fixture
def first_is_best(monkeypatch):
    """No evaluation is better than the first one."""
    take = Progress.take_validation

    def worse(self, accuracy, loss, *by):
        first = self.best_val_accuracy is None
        return take(self, accuracy if first else 0.0, loss if first else math.inf, *by)

    monkeypatch.setattr(Progress, "take_validation", worse)


def cramp(monkeypatch, room: int, since: int = 0) -> None:
    """Makes the objective run out of memory with more than `room` samples, after `since` calls."""
    real, calls = Classification.__call__, []

    def call(self, inputs, targets, mixing=None):
        calls.append(len(inputs))
        if len(calls) > since and len(inputs) > room:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return real(self, inputs, targets)

    monkeypatch.setattr(Classification, "__call__", call)


def test_a_failure_before_the_first_step_leaves_the_folder_free(run, monkeypatch):
    with monkeypatch.context() as patch:
        cramp(patch, room=5)
        code, _, error = run(*TINY, "--epochs", 1, "--output", "run")
    assert code == 2 and "out of memory: --batch_size 16 does not fit" in error
    assert not Path("run").exists()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        cramp(patch, room=5)
        assert run(*TINY, "--epochs", 1, "--output", "mine")[0] == 2
    assert Path("mine/notes.txt").exists()
    assert run(*TINY, "--epochs", 1, "--output", "mine")[0] == 0  # not "already holds a run"


@pytest.mark.slow
@pytest.mark.usefixtures("first_is_best")
def test_a_branch_has_its_starting_point_and_the_best_checkpoint(run, monkeypatch):
    flags = ["--val_fraction", "0.1", "--save_every", "2", "--checkpoint_hist", "1"]
    assert run(*TINY, *flags, "--epochs", 3, "--output", "run")[0] == 0
    summary = json.loads(Path("run/summary.json").read_text())
    best = Path("run") / summary["best_checkpoint"]
    assert best.name != f"step-{3 * STEPS:08}"
    real, saves = Checkpoints.save, []

    def killed(self, checkpoint, *args):
        saves.append(checkpoint.step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", killed)
        main(["--resume", "run", "--output", "branch", "--epochs", "5"])
    assert saves and real is Checkpoints.save
    found = {path.name for path in Path("branch/checkpoints").glob("step-*")}
    assert found == {best.name, f"step-{3 * STEPS:08}"}
    code, out, _ = run("--resume", "branch")
    assert code == 0 and f"from step {3 * STEPS}" in out
    branch = json.loads(Path("branch/summary.json").read_text())
    assert branch["steps"] == 5 * STEPS and "best_test_accuracy" in branch
    assert run("--resume", "run", "--epochs", "5")[0] == 0
    last = f"checkpoints/step-{5 * STEPS:08}/model.safetensors"
    assert Path("branch", last).read_bytes() == Path("run", last).read_bytes()


def test_a_run_without_metrics_can_be_branched(run):
    assert run(*TINY, "--epochs", 1, "--output", "run")[0] == 0
    Path("run/metrics.jsonl").unlink()
    assert run("--resume", "run", "--output", "branch", "--epochs", 2)[0] == 0


def test_out_of_memory_within_the_update_saves_no_half_updated_state(run, monkeypatch):
    real, calls = Average.update, []

    def update(self, step, bad):
        calls.append(step)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room for the difference")
        real(self, step, bad)

    flags = ["--ema_decay", "0.9", "--epochs", 2]
    assert run(*TINY, *flags, "--output", "whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Average, "update", update)
        code, _, error = run(*TINY, *flags, "--save_every", 1, "--output", "run")
    assert code == 2 and "Step 2 is saved" in error
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] != []
    assert run("--resume", "run")[0] == 0
    for name in ("model", "average", "optimizer"):
        last = f"checkpoints/step-{2 * STEPS:08}/{name}.safetensors"
        assert Path("run", last).read_bytes() == Path("whole", last).read_bytes()


def test_out_of_memory_in_a_dry_run_is_reported(run, monkeypatch):
    cramp(monkeypatch, room=8)
    code, _, error = run(*TINY, "--epochs", 1, "--dry_run", "--output", "run")
    assert code == 2 and "--batch_size 8 may" in error
    assert not Path("run").exists()


def test_a_dry_run_leaves_an_existing_run_alone(run):
    assert run(*TINY, "--epochs", 1, "--output", "run")[0] == 0
    code, _, error = run(*TINY, "--epochs", 1, "--dry_run", "--output", "run")
    assert code == 2 and "already holds a run" in error
    code, out, _ = run("--resume", "run", "--epochs", 3, "--dry_run")
    assert code == 0 and f"({2 * STEPS} steps left)" in out and "free in run" in out


def test_a_trace_that_cannot_be_written_costs_only_itself(run):
    Path("run/trace.json.gz").mkdir(parents=True)
    code, out, _ = run(*TINY, "--epochs", 3, "--profile", "--output", "run")
    assert code == 0 and "cannot be written" in out and "test accuracy" in out


@pytest.mark.slow
def test_the_note_on_the_schedule_is_printed_only_if_it_changes(run):
    for number, (schedule, said) in enumerate(
        [(["constant"], False), (["step", "--step_epochs", 1], False), (["linear"], True)]
    ):
        folder = f"run{number}"
        assert run(*TINY, "--epochs", 1, "--sched", *schedule, "--output", folder)[0] == 0
        code, out, _ = run("--resume", folder, "--epochs", 2)
        assert code == 0 and ("schedule spans" in out) is said


@pytest.mark.slow
def test_a_finished_run_points_to_its_report(run):
    assert run(*TINY, "--epochs", 1, "--no_report", "--output", "run")[0] == 0
    advice = "to write its report: --resume run --eval_only --report"
    assert not (Path("run/report").exists() or Path("run/report.html").exists())
    assert advice not in run("--resume", "run")[1]
    said = run("--resume", "run", "--report")[1]
    assert "this run is finished: 1 epoch, " in said and advice in said
    code, out, _ = run("--resume", "run", "--eval_only", "--report")
    assert code == 0 and "run/report" in out and Path("run/report.html").exists()
    assert sorted(path.name for path in Path("run/report").iterdir()) == [
        "confusion.csv", "confusion.png", "evaluated.csv", "per_class.csv",
    ]  # fmt: skip
    assert "to write its report" not in run("--resume", "run", "--report")[1]


@pytest.mark.slow
@pytest.mark.usefixtures("first_is_best")
def test_a_damaged_best_checkpoint_costs_only_its_figures(run):
    flags = ["--val_fraction", "0.1", "--eval_every", 1]
    assert run(*TINY, *flags, "--epochs", 2, "--output", "run")[0] == 0
    best = Path("run") / json.loads(Path("run/summary.json").read_text())["best_checkpoint"]
    (best / "model.safetensors").write_bytes(b"broken")
    code, out, _ = run("--resume", "run", "--epochs", 3)
    assert code == 0 and f"the best checkpoint, {best}, cannot be measured" in out
    code, out, _ = run("--resume", "run", "--eval_only")
    assert code == 0 and "is damaged" in out and "step 12, the last weights" in out
    code, out, _ = run(*TINY, "--pretrained", "run", "--epochs", 1, "--output", "next")
    assert code == 0 and "is damaged" in out and "weights from run, step 12" in out
    shutil.rmtree(best)
    assert run("--resume", "run", "--epochs", 4)[0] == 0


def test_a_resumed_run_keeps_the_precision_that_was_fastest(works, monkeypatch):
    def on_a_cpu(computes: bool, *argv) -> str:
        monkeypatch.setattr("utils.training.objective.is_faster_in_bf16", lambda device: computes)
        return works(*argv)

    flags = ["--precision", "fastest", "--eval_every", 0]
    assert "--precision fastest is bf16 on this CPU" in on_a_cpu(
        True, *TINY, *flags, "--max_steps", 1, "--output", "run"
    )
    assert "precision: bf16  # fastest\n" in Path("run/config.yaml").read_text()
    note = "note: --precision fastest is fp32 on this CPU; the run keeps bf16, as it began"
    for given in ([], flags):
        said = on_a_cpu(False, "--resume", "run", *given, "--max_steps", 2 + len(given))
        assert note in said
    assert json.loads(Path("run/summary.json").read_text())["precision"] == "bf16"
    assert "fastest" not in on_a_cpu(True, "--resume", "run", "--eval_only")
    evaluated = on_a_cpu(False, "--resume", "run", "--eval_only", "--precision", "fastest")
    assert "--precision fastest is fp32 on this CPU" in evaluated and note not in evaluated
