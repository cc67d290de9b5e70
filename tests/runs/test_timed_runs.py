"""Runs with --time_budget, whose clock is the number of steps."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed.faulty import Runs
from quick_runs import handlers_put_back, quick

import transformer_test
from utils.settings.run import budget_seconds
from utils.training.time_budget import Cost, TimeBudget
from utils.training.times import Clock

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--dataset headlines --subset 200 --batch_size 10 --layers 1 --dim 8 --heads 2 --ffn 8 "
    "--device cpu --threads 1 --no_baseline --log_every 1 --cache_dir cache"
)


def steady(step):
    return 5 + 0.5 * step


def slower(step):
    """Twice as slow from step 40 on."""
    return 5 + 0.5 * step + 0.5 * max(0, step - 40)


def rehearsed(budget, *_):
    budget.save = Cost(0.0)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """timed(text, seconds=...) -> exit code of transformer_test.py in this process. `seconds`: of
    the run after so many steps; nothing else takes any time but the report, 4 s."""
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("utils.runs.make_trainer.evaluation_seconds", lambda *_: 0.0)
    monkeypatch.setattr(TimeBudget, "rehearsed", rehearsed)
    monkeypatch.setattr("utils.training.time_budget.SLOWER", 1.0)  # the report is not slower

    def run(text: str, seconds=steady) -> int:
        clock = property(lambda clock: seconds(clock.progress.step))
        monkeypatch.setattr(Clock, "seconds_total", clock)
        with handlers_put_back():
            return transformer_test.main(text.split())

    return run


def summary(folder) -> dict:
    return json.loads(Path(folder, "summary.json").read_text())


def weights(folder) -> bytes:
    step = summary(folder)["steps"]
    return Path(folder, f"checkpoints/step-{step:08}/model.safetensors").read_bytes()


def rates(folder) -> list[float]:
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [record["lr"] for record in records if record.get("average_over") == "steps"]


def test_a_run_takes_the_steps_that_there_is_time_for(timed, capsys):
    assert timed(f"{FLAGS} --lr 0.1 --optimizer sgd --time 1m --output run") == 0
    (plan,) = summary("run")["time_plan"]
    steps = summary("run")["steps"]
    # 60 s less 5 before the steps, 4 for the report and 0.9 free.
    assert plan[1] == steps == 100
    assert f"time budget 1:00: {steps} steps (5.0 epochs)" in capsys.readouterr().out
    assert len(rates("run")) == steps
    assert rates("run")[-1] < 0.001 and rates("run")[steps // 2] == pytest.approx(0.05, abs=0.002)


@pytest.mark.parametrize("seconds", [steady, slower])
def test_a_stopped_run_goes_on_by_its_plans(timed, capsys, seconds):
    timed(f"{FLAGS} --time_budget 1m --save_every 5 --checkpoint_hist 99 --output whole", seconds)
    plans = summary("whole")["time_plan"]
    assert len(plans) == 1 if seconds is not slower else 1 < len(plans) < 6
    assert summary("whole")["steps"] == plans[-1][1]
    assert 57 < seconds(plans[-1][1]) + 5 < 61.2
    shutil.copytree("whole", "rest")
    for path in Path("rest/checkpoints").iterdir():
        if int(path.name[5:]) > plans[-1][0] + 5:
            shutil.rmtree(path)
    assert timed("--resume rest", seconds) == 0
    assert summary("rest")["time_plan"] == plans
    assert rates("rest") == rates("whole")
    assert weights("rest") == weights("whole")
    assert timed("--resume rest", seconds) == 0
    assert "a larger --epochs, with --time_budget none" in capsys.readouterr().out  # it is finished
    assert timed("--resume rest --time_budget none --epochs 6", seconds) == 0
    assert summary("rest")["steps"] == 120 and summary("rest")["time_plan"] is None


def test_what_is_too_short_leaves_no_run(timed, capsys):
    assert timed(f"{FLAGS} --time_budget 8s --output run") == 2
    said = capsys.readouterr().err
    assert "--time_budget 8s is too short: the start of the run, a step and an evaluation" in said
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "steps", "reason"),
    [("--epochs 2", 40, "--epochs"), ("--max_steps 7", 7, ""), ("--eval_every 0", 100, "")],
)
def test_limits_and_evaluations(timed, capsys, flags, steps, reason):
    assert timed(f"{FLAGS} --time_budget 1m {flags} --output run") == 0
    assert abs(summary("run")["steps"] - steps) <= 2
    assert (f"more steps are not trained, by {reason}" in capsys.readouterr().out) == bool(reason)


@pytest.mark.parametrize(
    "flags",
    [
        "--val_fraction 0.2 --sched plateau --plateau_patience 1 --early_stop_patience 99",
        "--accumulation_steps 2 --ema_decay 0.9 --sched onecycle",
        "--batch_tokens 300 --sched_per_epoch --warmup_epochs 1",
        "--mixup meta --auto_batch --eval_on_start",
    ],
)
def test_beside_other_flags(timed, flags):
    """Stopped after its first plan, and resumed."""
    assert timed(f"{FLAGS} --time_budget 1m {flags} --output run") == 0
    plans = summary("run")["time_plan"]
    shutil.copytree("run", "rest")
    shutil.rmtree(Path(f"rest/checkpoints/step-{plans[-1][1]:08}"))
    assert timed("--resume rest") == 0
    for run in ("run", "rest"):
        assert summary(run)["status"] == "finished" and summary(run)["steps"] == plans[-1][1]
    assert weights("rest") == weights("run")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--time 7", "--time_budget 7: a time such as 90s"),
        ("--time slurm", "SLURM_JOB_END_TIME"),
        ("--time 1m --mixup auto", "--mixup auto cannot be combined with --time_budget"),
        ("--time 1m --strategy local", "--strategy local cannot be combined with --time_budget"),
    ],
)
def test_refused(timed, capsys, monkeypatch, flags, said):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert timed(f"{FLAGS} {flags}") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5m", 90), ("2h", 7200), ("07:30", 450), ("1:00:05", 3605)],
)
def test_words_for_a_time(text, seconds):
    assert budget_seconds(text) == seconds


def test_the_time_counts_from_the_start_of_the_command():
    code = "import time; from utils.launch.environment import command_start; "
    code += "time.sleep(0.5); print(time.monotonic() - command_start())"
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert 0.45 < float(run.stdout) < time.monotonic() - started + 0.05


@pytest.mark.slow
def test_two_processes_follow_one_plan(tmp_path):
    runs = Runs(tmp_path)
    flags = [*FLAGS.split(), "--time_budget", "40s"]
    code, err = runs.train(flags, name="run", ENTRY="transformer_test", PACE="0.2")
    runs.close()
    assert code == 0, err
    result = runs.summary("run")
    assert result["world_size"] == 2 and result["status"] == "finished"
    assert result["steps"] == result["time_plan"][-1][1]
    assert 30 < result["seconds_total"] < 45  # the processes of other tests may come and go


def test_the_end_of_an_allocation_is_the_budget(timed, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1060")
    monkeypatch.setattr("utils.runs.time_budget.time.time", lambda: 1000.0)
    assert timed(f"{FLAGS} --time_budget slurm --output run") == 0
    # 5 s so far, and 60 that are left, of which 2 % stay free.
    assert "time budget 1:04: " in capsys.readouterr().out
