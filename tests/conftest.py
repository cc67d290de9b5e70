"""What all tests share: one thread, and a way to run the entry script as a user does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

# One thread for arithmetic, here and in every subprocess. It has to be set before PyTorch imports
# NumPy, whose OpenBLAS reads it then: with more threads than free cores it is thirty times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # train.py takes what the hub has

import pytest
import torch
from patience import PATIENCE
from quick_runs import QUICK_PROCESSES, handlers_put_back, quick

import resnet50_test

ROOT = Path(__file__).resolve().parent.parent
# Only `make test-dali` and `make test-ort`, which name these folders, collect them: they need
# packages of their own.
collect_ignore = ["dali", "ort"]
pytest_plugins = ["failures_at_once", "left_processes"]


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers(config):
    """How many processes `-n auto` starts: half as many again for slow tests, which often wait for
    a time limit and use no core meanwhile."""
    number = yield
    return -(-3 * number // 2) if config.option.markexpr == "slow" else number


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """PyTorch has its own threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_processes():
    """Processes that tests start are quick, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", QUICK_PROCESSES, prepend=os.pathsep)
        yield


@pytest.fixture
def hangup_ends():
    """SIGHUP has its usual effect, here and in new processes; under nohup it would be ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def run_entry_script():
    """run_entry_script(args, cwd=..., env=...) -> CompletedProcess with text."""

    def run(args, cwd=ROOT, env=None, script="resnet50_test.py", timeout=PATIENCE):
        return subprocess.run(
            [sys.executable, str(ROOT / script), *map(str, args)],
            cwd=cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def run_resnet(monkeypatch, tmp_path):
    """run_resnet(text) -> exit code of resnet50_test.py with these flags, within this process, in a
    new folder."""
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> int:
        with handlers_put_back():
            return resnet50_test.main(text.split())

    return run
