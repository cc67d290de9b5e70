"""A pytest that is killed, or reaches the time limit of a test, leaves no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

LONG = """
import subprocess

def test_long():
    script = "sleep 1800 & echo started; wait"
    subprocess.Popen(["sh", "-c", script], start_new_session=True).wait()
"""
TIME_LIMIT = ["-o", "faulthandler_timeout=2", "-o", "faulthandler_exit_on_timeout=true"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_what_tests_have_started_ends_with_pytest(tmp_path, signum):
    limit = TIME_LIMIT if signum is None else []
    (tmp_path / "test_long.py").write_text(LONG)
    own = {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "left_processes", *limit],
        cwd=tmp_path, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
        # A shell's job in the background ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    said = ""
    while "started" not in said and (line := process.stdout.readline()):
        said += line
    assert "started" in said, f"pytest has ended with {process.wait()}: {said}"
    if signum is not None:
        process.send_signal(signum)
    process.communicate(timeout=PATIENCE)  # returns when all have ended: they hold the pipe
