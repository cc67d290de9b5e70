"""Every command of the README, run as it stands, with flags that shorten it and local data."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SHORT = "--max_steps 2 --width 4 --threads 1 --device cpu --bs 8 --subset 40"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
ENTRY = [command for command in COMMANDS if command.startswith("python ")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder that looks like a clone, with pictures and a run in it."""
    folder = tmp_path_factory.mktemp("clone with spaces ä")
    for name in ("resnet50_test.py", "utils", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    rng = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 6)):
        for label, name in enumerate(("cat", "dog")):
            place = folder / "my_pictures" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (40, 50, 3)) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    result = run(folder, f"python resnet50_test.py --dataset shapes --output runs/my_run {SHORT}")
    assert result.returncode == 0, result.stderr
    return folder


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    words = [sys.executable, *shlex.split(command, comments=True)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def shortened(command: str) -> str:
    if "--help" in command:
        return command
    if "--resume" in command:  # its settings are those of the run
        return command.replace("--epochs 100", "--epochs 100 --max_steps 3")
    local = "" if "imagefolder" in command else "--dataset shapes"
    depth = "" if "--depth" in command else "--depth 18"
    return f"{command} {local} {depth} {SHORT}"


@pytest.mark.parametrize("command", ENTRY)
def test_command(workplace, command):
    result = run(workplace, shortened(command))
    assert result.returncode == 0, result.stderr
    assert "error" not in result.stderr and "Warning" not in result.stderr
    assert ("usage:" if "--help" in command else "test accuracy") in result.stdout


def test_other_commands_are_known():
    others = [command for command in COMMANDS if command not in ENTRY]
    assert others == ["make demo", "make test", "source .venv/bin/activate"]
    for target in ("demo", "test", "lint"):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_files_that_are_named_exist():
    for name in re.findall(r"`((?:utils|recipes|docs)/[\w/.]+)`", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_make_demo(tmp_path):
    """The whole demo, in the environment of these tests."""
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    result = subprocess.run(
        ["make", "demo", f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", result.stdout).group(1))
    assert accuracy >= 95
