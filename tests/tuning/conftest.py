"""A search over fake_entry.py, in this process or in one of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from finished_studies import SHORT
from patience import PATIENCE

HERE = Path(__file__).parent
BASE = ["--dataset", "shapes", "--device", "cpu", "--jobs", "1"]


@pytest.fixture
def start(tmp_path):
    """start(*flags, env=...) -> Popen of a search with its folder tmp_path/study."""

    def begin(*flags, env=None, **options):
        words = [*BASE, "--output", tmp_path / "study", *flags]
        return subprocess.Popen(
            [sys.executable, str(HERE / "fake_tuning.py"), *map(str, words)],
            env=os.environ | {"FAKE_TRACE": str(tmp_path / "trace")} | (env or {}),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, **options,
        )  # fmt: skip

    return begin


@pytest.fixture
def search(start):
    """search(*flags) -> (exit code, stdout, stderr)."""

    def run(*flags, **options):
        process = start(*flags, **options)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    return run


@pytest.fixture
def refuse(tmp_path, capsys):
    """refuse(*flags) -> the one line of an error with exit code 2; nothing is trained."""
    import fake_tuning

    from tuning import runner

    def nothing(*_, **__):
        raise AssertionError("a run was started")

    def check(*flags):
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        words = [*BASE, "--output", tmp_path / "refused", *flags]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner.subprocess, "Popen", nothing)
            code = fake_tuning.main([str(word) for word in words])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return check


@pytest.fixture
def space_file(tmp_path):
    def write(text):
        path = tmp_path / "space.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of an undisturbed search, and its output."""
    folder = tmp_path_factory.mktemp("reference")
    done = subprocess.run(
        [sys.executable, str(HERE / "fake_tuning.py"), *BASE, "--output", "study", *SHORT],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "study", done.stdout
