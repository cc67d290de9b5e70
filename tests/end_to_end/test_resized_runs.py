"""Runs on a built-in data set at another size than its own."""

import shutil
from pathlib import Path

import pytest
from data.images.picture_trees import make_tree

import vit_test
from utils.data.images import shapes

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]

FLAGS = ["--layers", 1, "--dim", 8, "--heads", 2, "--ffn", 8, "--batch_size", 10, "--max_steps", 6]


@pytest.fixture
def main(monkeypatch):
    monkeypatch.setattr(shapes, "TRAIN_PER_CLASS", 4)
    monkeypatch.setattr(shapes, "TEST_PER_CLASS", 2)
    return vit_test.main


def test_trained_resumed_evaluated_and_predicted_with(works):
    data = ["--dataset", "shapes", "--image_size", 16, "--cache_dir", "cache"]
    flags = [*FLAGS, "--threads", 1, "--device", "cpu", "--save_every", 3]
    said = works(*data, *flags, "--workers", 2, "--output", "run")
    assert "resized to 16x16 in cache/" in said
    shutil.copytree("run", "copy")
    shutil.rmtree("copy/checkpoints/step-00000006")
    shutil.rmtree("cache")  # they are resized again
    works("--resume", "copy", "--workers", 0)
    ends = [Path(run, "checkpoints/step-00000006/model.safetensors") for run in ("run", "copy")]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    assert "on 20 samples" in works("--resume", "run", "--eval_only")
    works("--resume", "run", "--predict", make_tree(Path("pictures"), per_class=3) / "test")
    assert len(Path("run/predictions.csv").read_text().splitlines()) == 7
