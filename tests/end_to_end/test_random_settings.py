"""Settings of the entries for pictures drawn at random (see random_settings.py)."""

import contextlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from quick_runs import handlers_put_back, quick
from random_settings import FEW, MANY, OPTIONS, OWN_PARTS, REPEATABLE, Space, few_curves, flags

import resnet50_test
import vit_test

OWN_CLASS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, classes))
"""
BASE = {
    "max_steps": 2, "device": "cpu", "threads": 1, "batch_size": 8, "output": "run",
    "data_dir": "pictures", "cache_dir": "cache", "log_every": 1,
}  # fmt: skip
# A tree of pictures, lists of these, a tree to be divided, a set that is not there, and one that
# needs no files.
DATA = [
    {"dataset": "imagefolder"},
    {"dataset": "csv"},
    {"dataset": "imagefolder", "data_dir": "one_tree", "test_fraction": 0.3},
    {"dataset": "cifar10", "data_dir": "run"},
    {"dataset": "shapes", "subset": 40},
]
VALUES = {
    "pretrained": ["trained", "trained/checkpoints", "weights.pth", "nowhere", "pictures"],
    "predict": ["pictures", "pictures/train/cat/0.png", "pictures/train.csv", "nowhere"],
    "eval_data": ["pictures", "one_tree", "pictures/train.csv", "nowhere"],
    "image_column": ["file", "1", "9"],
    "group_column": ["source", "3", "nothing"],
    "group_by": ["folder", r"(\d)\.png", "x", "("],
    "label_column": ["label", "2", "nothing"],
    "image_dir": [".", "train", "nowhere"],
    "image_size": [8, 9, 16, 33, 100],
    "image_size_schedule": ["8:0.5", "12:0.5", "16:0.3", "x"],
    "crop_padding": [0, 1, 4, 40],
    "cutout": [0, 3, 64],
    "auto_augment": ["none", "ra", "rand-m9-mstd0.5-inc1", "ta_wide", "imagenet", "3a", "rand-x"],
    "color_jitter": ["0", "0.4", "0.4,0.3,0.2,0.1", "0.4,0.4", "x"],
    "augment": ["own_parts.py:augment", "own_parts.py:curve", "nowhere.py:augment"],
    "ra_reps": [1, 2, 3],
    "eval_size": [8, 12, 40],
    "val_resize": [8, 10, 50, 500],
}
NEEDED = {"dataset", "device", "threads", "data_dir", "cache_dir"}
SPACES = {
    "resnet50_test": Space(
        resnet50_test.Settings,
        resnet50_test.main,
        base={"depth": 18, "width": 4} | BASE,
        own_values=VALUES,
        needed={"depth", "width"} | NEEDED,
        data=DATA,
    ),
    "vit_test": Space(
        vit_test.Settings,
        vit_test.main,
        base={"layers": 1, "dim": 8, "heads": 2, "ffn": 8} | BASE,
        own_values=VALUES
        | {
            "model": ["vit", "vit", "test_resnet", "nothing", "own.py:Net", "own.py:Nut"],
            "model_kwargs": ["pos_drop_rate=0.1", "nonsense=1", "x"],
            "patch_size": [4, 8, 3],
        },
        needed=NEEDED,
        data=DATA,
    ),
}


@pytest.fixture(scope="module", params=SPACES)
def space(request):
    return SPACES[request.param]


@pytest.fixture(scope="module")
def place(space, tmp_path_factory):
    """A folder with pictures and a trained run; the tests run in it."""
    folder = tmp_path_factory.mktemp("random")
    rng = np.random.default_rng(0)
    for tree, splits in (("pictures", {"train/": 12, "test/": 4}), ("one_tree", {"": 12})):
        for split, count in splits.items():
            for label, name in enumerate(("cat", "dog")):
                where = folder / tree / f"{split}{name}"
                where.mkdir(parents=True)
                for number in range(count):
                    pixels = rng.integers(0, 150, (16, 16, 3)) + 100 * label
                    Image.fromarray(pixels.astype(np.uint8)).save(where / f"{number}.png")
    for split in ("train", "test"):
        files = sorted((folder / "pictures").glob(f"{split}/*/*"))
        rows = [
            f"{split}/{path.parent.name}/{path.name},{path.parent.name},{path.stem}"
            for path in files
        ]
        (folder / "pictures" / f"{split}.csv").write_text("\n".join(["file,label,source", *rows]))
    (folder / "weights.pth").write_bytes(b"no weights")
    (folder / "classes.yaml").write_text("cat: 1\ndog: 0.25")
    (folder / "own_parts.py").write_text(OWN_PARTS)
    (folder / "classes.csv").write_text("class,weight\ncat,0\ndog,3")
    (folder / "labels.csv").write_text("file,label\ntest/cat/0.png,dog\n")
    (folder / "own.py").write_text(OWN_CLASS)
    with contextlib.chdir(folder), handlers_put_back():
        assert space.main(flags(space.base | {"dataset": "imagefolder", "output": "trained"})) == 0
        shutil.copytree("trained", "kept")
        yield folder


@settings(max_examples=FEW, derandomize=True, **OPTIONS)
@given(st.data())
def test_a_run_works_or_says_why_not(place, space, data):
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        space.check(data.draw(space.random()))


def test_steps_of_one_picture_that_ends_as_one_value_for_each_channel(place, space):
    """A case that failed once."""
    space.check(space.base | {"dataset": "imagefolder", "image_size": 8, "global_batch": 1})


@pytest.mark.slow
@settings(max_examples=MANY, derandomize=REPEATABLE, **OPTIONS)
@given(st.data())
def test_many_runs_work_or_say_why_not(place, space, data):
    with few_curves():
        space.check(data.draw(space.random()))


def test_every_setting_can_be_drawn(space):
    for name in space.drawn:
        space.values(name)
