"""SIGTERM, SIGINT and SIGHUP at any moment: the step is finished and saved, and the run resumes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from patience import PATIENCE
from quick_runs import QUICK_PROCESSES, handlers_put_back, quick, raise_in_step
from safetensors.torch import load_file
from soak import of_the_soak

from resnet50_test import main
from utils.launch.signals import Signals, StoppedBySignal
from utils.tasks import pictures as image_task

ROOT = Path(__file__).parents[2]
TINY = [
    "--dataset", "shapes", "--depth", "18", "--width", "4", "-b", "32", "--threads", "1",
    "--device", "cpu", "--log_every", "3", "--save_every", "25",
]  # fmt: skip
FLAGS = [*TINY, "--subset", "96", "--epochs", "3"]  # 9 steps
LONG = [*TINY, "--subset", "600", "--epochs", "4"]  # of some seconds


def start(*arguments) -> subprocess.Popen:
    """Starts the entry script in its own session, by which all its processes are found."""
    return subprocess.Popen(
        [sys.executable, "resnet50_test.py", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def weights(folder: Path) -> dict:
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return load_file(newest / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run of FLAGS."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch, handlers_put_back():
        quick(patch)
        assert main([*FLAGS, "--output", str(folder)]) == 0
    return folder


def losses(folder: Path) -> list:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["split"], r["loss"], r["accuracy"]) for r in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder", "hangup_ends")
@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_in_training_saves_and_resumes(whole, monkeypatch, capfd, signum, code):
    with monkeypatch.context() as patch:
        raise_in_step(patch, 5, signum)
        assert main([*FLAGS, "--output", "run"]) == code
    err = capfd.readouterr().err
    assert "saved; resume with --resume" in err and len(err.splitlines()) == 1
    assert json.loads(Path("run/summary.json").read_text())["status"] == "interrupted"
    assert main(["--resume", "run"]) == 0
    out = capfd.readouterr().out
    assert "from step 5" in out
    ours, expected = weights(Path("run")), weights(whole)
    assert all((ours[name] == expected[name]).all() for name in expected)
    assert losses(Path("run")) == losses(whole)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["test_samples"] == 100
    assert f"test accuracy {summary['test_accuracy']:.2f} %" in out


@pytest.mark.usefixtures("own_folder")
def test_a_signal_before_the_first_step_saves_nothing(monkeypatch, capfd):
    load = image_task.load_image_task

    def interrupted(*arguments):
        assert Path("run").is_dir()  # the data is not loaded yet
        signal.raise_signal(signal.SIGTERM)
        return load(*arguments)

    monkeypatch.setattr(image_task, "load_image_task", interrupted)
    assert main([*FLAGS, "--output", "run"]) == 143
    assert "nothing to save" in capfd.readouterr().err
    assert not Path("run/checkpoints").exists()


IN_IMPORT = """
import signal, sys
class SignalFinder:
    def find_spec(self, name, path, target=None):
        if name == "torch.autograd":
            signal.raise_signal(signal.SIGTERM)
sys.meta_path.insert(0, SignalFinder())
from resnet50_test import main
code = main(sys.argv[1:])
sys.exit(code if "torch" in sys.modules else "the import of PyTorch was broken off")
"""


@pytest.mark.slow
def test_a_signal_in_the_import_of_pytorch_waits_for_its_end(tmp_path):
    """During it C++ calls Python, where an exception would end the process by SIGABRT."""
    result = subprocess.run(
        [sys.executable, "-c", IN_IMPORT, *FLAGS, "--output", tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (
        143, "stopped before the first step: nothing to save\n",
    )  # fmt: skip


TWO_SIGNALS = """
import signal, sys
import pytest
from quick_runs import raise_in_step
from resnet50_test import main
raise_in_step(pytest.MonkeyPatch(), 2, signal.SIGTERM, signal.SIGINT)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path):
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (ROOT, here.parent, here, QUICK_PROCESSES)))
    result = subprocess.run(
        [sys.executable, "-c", TWO_SIGNALS, *FLAGS, "--output", tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (130, "stopped at once by a second signal\n")
    assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.usefixtures("own_folder")
def test_a_finished_run_says_so(whole, capfd):
    before = losses(whole)
    assert main(["--resume", str(whole)]) == 0
    out = capfd.readouterr().out
    assert "this run is finished" in out and "--epochs" in out
    assert losses(whole) == before
    assert main(["--resume", str(whole), "--eval_only"]) == 0
    accuracy = json.loads((whole / "summary.json").read_text())["test_accuracy"]
    assert f"test accuracy {accuracy:.2f} % (" in capfd.readouterr().out


@pytest.mark.usefixtures("own_folder")
def test_a_longer_run_that_was_killed_before_its_test_is_not_finished(whole):
    """Its summary is that of the shorter run."""
    shutil.copytree(whole, "run")
    path = Path("run/summary.json")
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"steps": 6, "test_accuracy": -1.0}))
    assert main(["--resume", "run"]) == 0
    again = json.loads(path.read_text())
    assert (again["steps"], again["test_accuracy"]) == (9, summary["test_accuracy"])


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """The uninterrupted run of LONG, as a user starts it."""
    folder = tmp_path_factory.mktemp("long") / "run"
    code, _, err = finish(start(*LONG, "--output", folder))
    assert code == 0, err
    return folder


KINDS = [("SIGTERM", 0), ("SIGKILL", 0)]
# SIGINT takes the way of SIGTERM.
MORE = [("SIGINT", 0), *((kind, seed) for kind in ("SIGTERM", "SIGKILL") for seed in (1, 2, 3))]
KINDS += [pytest.param(*case, marks=of_the_soak) for case in MORE]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), KINDS)
def test_signals_at_random_moments_change_no_result(tmp_path, long_run, kind, seed):
    """Again and again until the run has ended; the result is the uninterrupted one."""
    rng = random.Random(f"{kind} {seed}")
    folder = tmp_path / "run"
    for attempt in range(30):
        again = ["--resume", folder] if (folder / "config.yaml").exists() else ["--output", folder]
        process = start(*([] if again[0] == "--resume" else LONG), *again)
        try:
            process.wait(rng.uniform(1.0, 9.0) if attempt < 3 else PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(getattr(signal, kind))
        code, _, err = finish(process)
        if code == 0:
            break
        expected = {"SIGTERM": {143, -15}, "SIGINT": {130, -2}, "SIGKILL": {-9}}[kind]
        assert code in expected, err
    assert code == 0
    ours, expected = weights(folder), weights(long_run)
    assert all((ours[name] == expected[name]).all() for name in expected)
    assert losses(folder) == losses(long_run)
    assert os.path.exists(folder / "curves.png")


@pytest.mark.usefixtures("own_folder")  # which restores the handlers
def test_a_signal_is_held_where_no_exception_may_be_raised():
    signals, reached = Signals(), False
    with pytest.raises(StoppedBySignal) as stopped, signals.held():
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
    assert reached and stopped.value.exit_code == 143


class Referent:
    """An object to which a weak reference can point."""


@pytest.mark.usefixtures("own_folder")
def test_a_signal_where_python_ignores_exceptions_still_stops_the_run(capfd):
    """As in a weak reference's callback, which the import system uses."""
    Signals()
    with pytest.raises(StoppedBySignal) as stopped:
        referent = Referent()
        reference = weakref.ref(referent, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del referent
        time.sleep(PATIENCE)  # which the timer cuts short
    assert reference() is None and stopped.value.exit_code == 130
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("own_folder")
def test_other_exceptions_that_python_ignores_are_still_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    Signals()
    referent = Referent()
    reference = weakref.ref(referent, lambda _: 1 / 0)
    del referent
    assert reference() is None
    assert [kind.exc_type for kind in reported] == [ZeroDivisionError]
