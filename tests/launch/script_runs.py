"""Runs of run_distributed.sh, whose workers leave notes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "run_distributed.sh"
ENTRY = Path(__file__).with_name("entry_for_launch.py")


class Launches:
    """Starts run_distributed.sh in `folder`, where workers also leave their notes."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []

    def start(self, *arguments, notes="notes", before=(), **environ) -> subprocess.Popen:
        (self.folder / notes).mkdir(exist_ok=True)
        (self.folder / "tmp").mkdir(exist_ok=True)
        known = {name: value for name, value in os.environ.items() if "SLURM" not in name}
        mine = {"PYTHON": sys.executable, "NOTES": str(self.folder / notes)}
        mine |= {"TMPDIR": str(self.folder / "tmp"), "CUDA_VISIBLE_DEVICES": "", "NPROC": "2"}
        launch = subprocess.Popen(
            [*before, "bash", str(SCRIPT), *map(str, arguments)],
            cwd=self.folder,
            env=known | mine | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(launch)
        return launch

    def run(self, *arguments, **environ) -> tuple[int, str, str]:
        """Waits for a launch to end: (exit code, stdout, stderr)."""
        launch = self.start(*arguments, **environ)
        out, err = launch.communicate(timeout=PATIENCE)
        return launch.returncode, out, err

    def starts(self, notes: str = "notes") -> list[dict]:
        """The notes that workers made at their starts."""
        path = self.folder / notes / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def nothing_left(self) -> bool:
        """Asserts that there is no worker and no temporary file."""
        pids = [start["pid"] for path in self.folder.glob("notes*") for start in
                self.starts(path.name)]  # fmt: skip
        return not any(map(alive, pids)) and not any((self.folder / "tmp").iterdir())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
