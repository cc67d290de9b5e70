"""`bash run_distributed.sh --check` with real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

SCRIPT = Path(__file__).resolve().parents[2] / "run_distributed.sh"


def check(folder: Path, *flags) -> tuple[int, str, str, dict]:
    """(exit code, stdout, stderr, the JSON file)."""
    folder.mkdir()
    environ = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", SCRIPT, "--check", *map(str, flags)],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    (file,) = (folder / "runs").glob("check-*.json")
    return done.returncode, done.stdout, done.stderr, json.loads(file.read_text())


@pytest.mark.slow
def test_two_processes_are_checked_together(tmp_path):
    code, out, err, report = check(tmp_path / "sound", "--output", tmp_path / "run")
    assert (code, err, report["result"]) == (0, "", "ok"), out
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]  # two, though there is no GPU
    assert len(report["collectives"]) == 4 and report["difference_from_one_process"] < 1e-10
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_does_not_hold_ends_all_with_1_and_nothing_is_restarted(tmp_path):
    (tmp_path / "file").touch()
    code, out, err, report = check(tmp_path / "unsound", "--output", tmp_path / "file" / "run")
    assert (code, err, report["result"]) == (1, "", "fails"), out
    assert "failed: folder" in out
