"""A short run on real pictures, if they are given (REAL_DATA, see pyproject.toml)."""

import json
import os
from pathlib import Path

import pytest

FOLDER = os.environ.get("REAL_DATA")
pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(not FOLDER, reason="needs the folder of real images that REAL_DATA names"),
]


@pytest.mark.slow
def test_the_cpu_recipe_learns(tmp_path, run_entry_script):
    """120 steps of recipes/cifar10_cpu.yaml, in float32, are far above chance."""
    output = tmp_path / "run"
    result = run_entry_script(
        ["--config", "recipes/cifar10_cpu.yaml", "--data_dir", Path(FOLDER) / "cifar10-jpeg",
         "--cache_dir", tmp_path / "cache", "--width", "8", "--max_steps", "120",
         "--warmup_steps", "20", "--precision", "fp32", "--eval_every", "0", "--output", output],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["train_samples"], summary["test_samples"]) == (50_000, 10_000)
    assert summary["test_accuracy"] > 35
    again = run_entry_script(["--resume", output, "--eval_only"])
    assert f"test accuracy {summary['test_accuracy']:.2f} % (" in again.stdout
    assert " on 10,000 samples" in again.stdout
