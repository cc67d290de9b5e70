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
    "demo-tuning-texts": "--subset 0.2 --epochs 2 --trials 3",
    "demo-tuning-pictures": "--subset 0.1 --epochs 1 --trials 2",
}


@pytest.mark.slow
def test_make_demo_tuning(tmp_path):
    """With shorter searches, in a copy, as an existing study would be continued."""
    for name in (*ENTRIES, "utils", "recipes", "tuning", "Makefile", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    make = ["make", "-n", "--no-print-directory", "demo-tuning", f"VENV={environment}"]
    commands = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    for name, flags in SHORTER.items():
        assert commands.count(f"--output runs/{name}") == 1
        commands = commands.replace(f"--output runs/{name}", f"{flags} --output runs/{name}")
    result = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("recipe: runs/demo-tuning-") == 2
    assert result.stdout.count("\nrank  trial") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["demo", "demo-text", pytest.param("demo-vit", marks=of_the_soak)]
)
def test_make_demo(target):
    """The whole demo, in the environment of these tests."""
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    result = subprocess.run(
        ["make", target, f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", result.stdout).group(1))
    assert accuracy >= (90 if target == "demo-vit" else 95)
