"""Settings of resnet50_test.py drawn at random (see random_settings.py)."""

import contextlib
import shutil

import numpy as np
import pytest
from hypothesis import example, given, settings
from PIL import Image
from quick_runs import handlers_put_back, quick
from random_settings import FEW, MANY, OPTIONS, REPEATABLE, Space, flags

from resnet50_test import Settings, main

PICTURES = Space(
    Settings,
    main,
    base={
        "max_steps": 2, "depth": 18, "width": 4, "device": "cpu", "threads": 1, "batch_size": 8,
        "output": "run", "data_dir": "pictures", "cache_dir": "cache", "log_every": 1,
    },
    # A tree of pictures, one to be divided, sets that are not there, one that needs no files.
    data=[
        {"dataset": "imagefolder"},
        {"dataset": "imagefolder", "data_dir": "one_tree", "test_fraction": 0.3},
        {"dataset": "cifar10", "data_dir": "run"},
        {"dataset": "shapes", "subset": 40},
    ],
    own_values={
        "pretrained": ["trained", "trained/checkpoints", "weights.pth", "nowhere", "pictures"],
        "predict": ["pictures", "pictures/train/cat/0.png", "nowhere"],
        "image_size": [8, 9, 16, 33, 100],
        "crop_padding": [0, 1, 4, 40],
        "cutout": [0, 3, 64],
    },
    needed={"dataset", "depth", "width", "device", "threads", "data_dir", "cache_dir"},
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
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
    (folder / "weights.pth").write_bytes(b"no weights")
    with contextlib.chdir(folder), handlers_put_back():
        assert main(flags(PICTURES.base | {"dataset": "imagefolder", "output": "trained"})) == 0
        shutil.copytree("trained", "kept")
        yield folder


# A case that failed once: steps of one picture, which ends as one value for each channel.
@example(PICTURES.base | {"dataset": "imagefolder", "image_size": 8, "global_batch": 1})
@settings(max_examples=FEW, derandomize=True, **OPTIONS)
@given(PICTURES.random())
def test_a_run_works_or_says_why_not(place, chosen):
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        PICTURES.check(chosen)


@pytest.mark.slow
@settings(max_examples=MANY, derandomize=REPEATABLE, **OPTIONS)
@given(PICTURES.random())
def test_many_runs_work_or_say_why_not(place, chosen):
    PICTURES.check(chosen)


def test_every_setting_can_be_drawn():
    for name in PICTURES.drawn:
        PICTURES.values(name)
