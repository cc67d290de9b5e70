"""A test that fails is named before the others have ended."""

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

TESTS = """
import time
from pathlib import Path

def test_wrong():
    assert 1 == 2

def test_long():
    end = time.monotonic() + 60
    while time.monotonic() < end and not Path("named").exists():
        time.sleep(0.01)
    assert Path("named").exists()
"""


def test_a_failure_is_named_at_once(tmp_path):
    """By the process that starts the others, as in `make test`."""
    (tmp_path / "test_some.py").write_text(TESTS)
    own = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", "1", "-p", "failures_at_once"],
        cwd=tmp_path, env=os.environ | own, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = "FAILED test_some.py::test_wrong - assert 1 == 2\n"
    assert line in iter(process.stdout.readline, "")  # the other test waits for the file
    (tmp_path / "named").touch()
    said, _ = process.communicate(timeout=PATIENCE)
    assert "1 failed, 1 passed" in said
