"""SIGTERM and SIGINT at any moment: the step is finished, saved, and the run can go on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from utils.signals import Signals, Stopped

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--dataset", "shapes", "--depth", "18", "--width", "4", "--subset", "600", "-b", "32",
    "--epochs", "4", "--threads", "1", "--device", "cpu", "--log_every", "3", "--save_every", "25",
]  # fmt: skip


def start(*arguments) -> subprocess.Popen:
    """The entry script in a session of its own, by which all its processes are found."""
    return subprocess.Popen(
        [sys.executable, "resnet50_test.py", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def wait_for(folder: Path, text: str, process) -> None:
    """Until the run's log holds `text`."""
    for _ in range(2400):
        log = folder / "log.txt"
        if process.poll() is not None or (log.exists() and text in log.read_text()):
            return
        time.sleep(0.02)
    raise AssertionError(f"{text!r} was never said")


def weights(folder: Path) -> dict:
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return load_file(newest / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, _, err = finish(start(*FLAGS, "--output", folder))
    assert code == 0, err
    return folder


def losses(folder: Path) -> list:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["split"], r["loss"], r["accuracy"]) for r in map(json.loads, lines)]


def resume_to_the_end(folder: Path, whole: Path) -> None:
    code, out, err = finish(start("--resume", folder))
    assert code == 0, err
    ours, expected = weights(folder), weights(whole)
    assert all((ours[name] == expected[name]).all() for name in expected)
    assert losses(folder) == losses(whole)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["test_samples"] == 1000
    assert f"test accuracy {summary['test_accuracy']:.2f} %" in out


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_in_training_saves_and_resumes(tmp_path, whole, signum, code):
    folder = tmp_path / "run"
    process = start(*FLAGS, "--output", folder)
    wait_for(folder, "epoch 1:", process)
    process.send_signal(signum)
    returned, _, err = finish(process)
    assert returned == code
    assert "saved; go on with --resume" in err and len(err.splitlines()) == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    resume_to_the_end(folder, whole)


def test_signal_before_the_first_step_saves_nothing(tmp_path):
    folder = tmp_path / "run"
    process = start(*FLAGS, "--output", folder)
    while not folder.exists():  # PyTorch is imported, the data is not there yet
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    returned, _, err = finish(process)
    assert returned == 143 and "nothing to save" in err
    assert not (folder / "checkpoints").exists()


def test_a_second_signal_stops_at_once(tmp_path):
    folder = tmp_path / "run"
    process = start(*FLAGS, "--output", folder, "--epochs", "500")
    wait_for(folder, "epoch 1:", process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    returned, _, _ = finish(process)
    assert returned in (130, 143)


def test_a_finished_run_says_so(tmp_path, whole):
    before = losses(whole)
    code, out, _ = finish(start("--resume", whole))
    assert code == 0 and "this run is finished" in out and "--epochs" in out
    assert losses(whole) == before
    code, out, _ = finish(start("--resume", whole, "--eval_only"))
    accuracy = json.loads((whole / "summary.json").read_text())["test_accuracy"]
    assert code == 0 and f"test accuracy {accuracy:.2f} % on 1,000 samples" in out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_signal_at_random_moments(tmp_path, whole, kind, seed):
    """Again and again until the run is through; the result is the uninterrupted one."""
    rng = random.Random(f"{kind} {seed}")
    folder = tmp_path / "run"
    for attempt in range(30):
        again = ["--resume", folder] if (folder / "config.yaml").exists() else ["--output", folder]
        process = start(*([] if again[0] == "--resume" else FLAGS), *again)
        try:
            process.wait(rng.uniform(1.0, 9.0) if attempt < 3 else 120)
        except subprocess.TimeoutExpired:
            process.send_signal(getattr(signal, kind))
        code, _, err = finish(process)
        if code == 0:
            break
        expected = {"SIGTERM": {143, -15}, "SIGINT": {130, -2}, "SIGKILL": {-9}}[kind]
        assert code in expected, err
    assert code == 0
    ours, expected = weights(folder), weights(whole)
    assert all((ours[name] == expected[name]).all() for name in expected)
    assert losses(folder) == losses(whole)
    assert os.path.exists(folder / "curves.png")


@pytest.mark.usefixtures("own_folder")  # which puts the handlers back
def test_a_signal_is_held_where_no_exception_may_be_raised():
    signals, reached = Signals(), False
    with pytest.raises(Stopped) as stopped, signals.held():
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
    assert reached and stopped.value.exit_code == 143
