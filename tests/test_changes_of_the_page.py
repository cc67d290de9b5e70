"""The changes that docs/architecture.md shows, in a copy of the project: a measure, an augmentation
and a data set."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE
from project_copy import ROOT, copy_project
from quick_runs import QUICK_PROCESSES
from short_runs import call

PAGE = ROOT / "docs/architecture.md"
SMALL = "--depth 18 --width 4 --bs 16 --threads 1 --device cpu"


def make_changes(text: str, folder: Path) -> None:
    """Makes the changes of a block: a file after +++, its changes between lines of @@."""
    for part in re.split(r"^\+\+\+ ", text, flags=re.M)[1:]:
        name, _, changes = part.partition("\n")
        file = folder / name
        for change in changes.split("@@\n"):
            lines = change.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            after = "".join(line[1:] for line in lines if line[0] != "-")
            content = file.read_text() if before else ""
            assert not before or content.count(before) == 1, f"{name}: {before}"
            file.write_text(content.replace(before, after))


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A copy of the project with all changes of the page."""
    folder = copy_project(tmp_path_factory.mktemp("changed"))
    blocks = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        make_changes(block, folder)
    return folder


def train(checkout: Path, folder: Path, flags: str) -> list[dict]:
    """Trains, or goes on; returns the records of the run."""
    command = f"PYTHONPATH={shlex.quote(QUICK_PROCESSES)} python resnet50_test.py {flags}"
    done = call(checkout, command, folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_all_of_them(changed, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}_images": rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
        for name, n in (("train", 48), ("test", 20))
    }
    arrays |= {"train_labels": np.arange(48) % 8, "test_labels": np.arange(20) % 8}
    np.savez(tmp_path / "pictures.npz", **arrays)
    flags = f"--dataset npz --data_dir . --grayscale 0.5 --epochs 1 --output run {SMALL}"
    records = train(changed, tmp_path, f"{flags} --metrics recall_gmean,recall")
    assert {record["split"] for record in records} == {"train", "test"}
    (tested,) = (record for record in records if record["split"] == "test")
    assert 0 <= tested["recall_gmean"] <= tested["recall_macro"]


@pytest.mark.slow
def test_the_augmentation_turns_gray_what_it_has_drawn(changed):
    code = """
import numpy as np, torch
from utils.augment.grayscale import Grayscale
pictures = torch.randint(0, 256, (60, 4, 5, 3), dtype=torch.uint8)
augment = Grayscale(0.5)
plan = augment.draw(60, np.random.default_rng(0))
made = augment.apply(pictures, plan)
gray = (made == made[..., :1]).flatten(1).all(1)
assert gray.tolist() == plan.tolist() and 10 < plan.sum() < 50
assert torch.equal(made[~gray], pictures[~gray])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=changed, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
