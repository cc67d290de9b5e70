"""Processes that index pictures."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
# Starts indexing processes as a run does, and waits.
PROGRAM = """
import os, sys
from utils.data.images import scanning
from utils.data.images.records import File
if __name__ == "__main__":
    scanning.MANY_FILES = 1
    part = scanning.FolderPart([File("a", 1, 0)], [0])
    with scanning._executor([part, part], False, 2) as executor:
        print(executor.submit(os.getpid).result(), flush=True)
        sys.stdin.read()
"""


def test_indexing_processes_end_when_the_main_one_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert int(process.stdout.readline()) != process.pid
        process.kill()
        process.communicate(timeout=PATIENCE)  # they hold its standard output until they end
    finally:
        process.stdin.close(), process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
