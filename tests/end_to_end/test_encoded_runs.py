"""Runs whose pictures are decoded while training: from a folder and from shards."""

import shutil
from pathlib import Path

import pytest
from data.images.picture_sources import CLASSES, write_source
from data.images.picture_trees import make_tree

from utils.data.images import pack

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]

SIZES = ["--depth", 18, "--width", 4, "--epochs", 2, "--batch_size", 4, "--image_size", 8]
AUGMENT = ["--crop", "resized", "--crop_ratio", 0.875, "--random_erasing", 0.5, "--cutout", 2]
AUGMENT += ["--auto_augment", "rand-m9-mstd0.5-inc1", "--ra_reps", 2]
FLAGS = [*SIZES, *AUGMENT, "--save_every", 4, "--threads", 1, "--device", "cpu"]


def weights(run: str, step: int) -> bytes:
    return Path(run, f"checkpoints/step-{step:08}/model.safetensors").read_bytes()


def went_on(works, run: str, *flags) -> None:
    """A copy of the finished run, without its end, ends with the same bits."""
    shutil.copytree(run, "copy")
    for step in (8, 10):
        shutil.rmtree(f"copy/checkpoints/step-{step:08}")
    works("--resume", "copy", *flags)
    assert weights("copy", 10) == weights(run, 10)


def test_a_folder(works, fails):
    tree = make_tree(Path("pictures"), per_class=10, side=12)
    data = ["--dataset", "imagefolder", "--data_dir", tree, "--cache_dir", "cache"]
    said = works(*data, *FLAGS, "--workers", 2, "--output", "run")
    assert "decoded while training" in said
    went_on(works, "run", "--workers", 0)
    assert "on 20 samples" in works("--resume", "run", "--eval_only")
    works("--resume", "run", "--predict", tree / "test")
    assert len(Path("run/predictions.csv").read_text().splitlines()) == 21
    works(*data, *FLAGS, "--workers", 0, "--output", "alone")
    assert weights("alone", 10) == weights("run", 10)
    (tree / "train" / "cat" / "000.png").write_bytes(b"no picture")
    assert "000.png is not a readable picture" in fails("--resume", "run", "--epochs", 3)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_lists_and_parquet_files(works, kind):
    """Trained, resumed, evaluated, and predicted with, as from shards."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    tree = make_tree(Path("pictures"), per_class=10, side=12)
    splits = {
        split: [
            (path.read_bytes(), label)
            for label, name in enumerate(CLASSES)
            for path in sorted((tree / split / name).iterdir())
        ]
        for split in ("train", "test")
    }
    write_source(kind, Path("set"), splits)
    data = ["--dataset", kind, "--data_dir", "set", "--cache_dir", "cache"]
    said = works(*data, *FLAGS, "--workers", 0, "--output", "run")
    assert f"{kind}: 20 training" in said and "decoded while training" in said
    went_on(works, "run")
    assert "on 20 samples" in works("--resume", "run", "--eval_only")
    works("--resume", "run", "--predict", tree / "test")
    assert Path("run/predictions.csv").read_text().count("cat") > 10
    folder = ["--dataset", "imagefolder", "--data_dir", tree, "--cache_dir", "cache"]
    works(*folder, *FLAGS, "--workers", 0, "--output", "same")
    assert weights("same", 10) == weights("run", 10)
    if kind == "csv":
        said = works("--data_dir", "set/train.csv", *SIZES, "--dry_run")
        assert "note: --dataset csv, since set/train.csv is a list" in said
        assert "20 test pictures" in said


def test_packed_shards(works, fails):
    make_tree(Path("pictures"), per_class=10, side=12)
    pack.pack(Path("pictures"), Path("shards"), 4000, progress=False)
    data = ["--dataset", "tar", "--data_dir", "shards", "--cache_dir", "cache"]
    works(*data, *FLAGS, "--workers", 0, "--output", "run")
    went_on(works, "run")
    assert "on 20 samples" in works("--resume", "run", "--eval_only")
    for path in Path("shards").glob("train-00000-*"):
        path.write_bytes(path.read_bytes()[:1000])
    assert "cut short" in fails("--resume", "run", "--epochs", 3)
