"""The demos of the Makefile, in the environment of these tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ENTRIES, ROOT
from soak import of_the_soak

# Added to the commands of `make demo-tuning`, which would take minutes: the last value counts.
SHORTER = {
    "demo-tuning-texts": "--subset 0.2 --epochs 2 --trials 2 --confirm 0",
    "demo-tuning-pictures": "--subset 0.1 --epochs 1 --trials 1 --confirm 0",
}


def commands_of(target: str, folder: Path) -> str:
    """What make would do, in the environment of these tests."""
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    make = ["make", "-n", "--no-print-directory", target, f"VENV={environment}"]
    return subprocess.run(make, cwd=folder, capture_output=True, text=True, check=True).stdout


def done(commands: str, folder: Path) -> str:
    """Carries them out; returns their output."""
    result = subprocess.run(["bash", "-ec", commands], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_make_demo_tuning(tmp_path):
    """With shorter searches, in a copy, as an existing study would be continued."""
    for name in (*ENTRIES, "utils", "recipes", "tuning", "Makefile", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = commands_of("demo-tuning", tmp_path)
    for name, flags in SHORTER.items():
        assert commands.count(f"--output runs/{name}") == 1
        commands = commands.replace(f"--output runs/{name}", f"{flags} --output runs/{name}")
    said = done(commands, tmp_path)
    assert said.count("recipe: runs/demo-tuning-") == 2
    assert said.count("\nrank  trial") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["demo", "demo-text", pytest.param("demo-vit", marks=of_the_soak)]
)
def test_make_demo(target, monkeypatch):
    """With whole data sets, plots and pages."""
    monkeypatch.delenv("PYTHONPATH")
    # A busy machine has few steps in a minute.
    said = done(commands_of(target, ROOT).replace("--time 1m", "--epochs 4"), ROOT)
    accuracy = float(re.search(r"test accuracy ([\d.]+) % .*report.html", said)[1])
    assert accuracy >= (95 if target == "demo-text" else 80)
