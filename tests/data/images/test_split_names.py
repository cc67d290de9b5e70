"""Splits by the names of shards."""

import re

import pytest

from utils.data.images.shards import divided, find_shards
from utils.data.images.split_names import class_folder
from utils.errors import UserError

TARS = re.compile(r".*\.tar")
TRAIN, VAL = "imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"


@pytest.mark.parametrize(
    "names, splits",
    [
        ((TRAIN, VAL), {"train": [TRAIN], "val": [VAL]}),
        (("a-train-0.tar", "a-val-0.tar", "test_a.tar"),
         {"train": ["a-train-0.tar"], "val": ["a-val-0.tar"], "test": ["test_a.tar"]}),
        (("data/train-0.tar", "data/valid-0.tar"),
         {"train": ["data/train-0.tar"], "val": ["data/valid-0.tar"]}),
        # How a name begins counts more than another word in it, or in its folder.
        (("my-train-set/train-val.tar", "my-train-set/val-train.tar"),
         {"train": ["my-train-set/train-val.tar"], "val": ["my-train-set/val-train.tar"]}),
        (("train/a-test.tar", "test/a-train.tar"),
         {"train": ["train/a-test.tar"], "test": ["test/a-train.tar"]}),
        (("a.tar", "trainer.tar"), {"all": ["a.tar", "trainer.tar"]}),
        (("train-0.tar", "val-0.tar", "validation-0.tar"),
         {"train": ["train-0.tar"], "val": ["val-0.tar", "validation-0.tar"]}),
        # Words inside names count only where each shard has one, of two splits or more.
        (("set-test-0.tar", "set-test-1.tar"), {"all": ["set-test-0.tar", "set-test-1.tar"]}),
        (("bullet-train-0.tar", "car-0.tar"), {"all": ["bullet-train-0.tar", "car-0.tar"]}),
        (("my-train-val-0.tar", "my-test-0.tar"),
         {"all": ["my-test-0.tar", "my-train-val-0.tar"]}),
    ],
)  # fmt: skip
def test_splits_by_the_names_of_shards(tmp_path, names, splits):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_shards("tar", tmp_path, TARS) == splits


@pytest.mark.parametrize(
    "names, problem",
    [
        (("train-0.tar", "other.tar", "test-0.tar"), "other.tar does not tell its split"),
        (("val-0.tar",), "has no training shards"),
        ((TRAIN, "other.tar"), "have val, valid, validation or test as a word"),
        (("training.tar", "evaluation.tar"), "have val, valid, validation or test as a word"),
    ],
)
def test_names_of_shards_that_are_refused(tmp_path, names, problem):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=problem):
        divided(tmp_path, find_shards("tar", tmp_path, TARS), None)


def test_a_folder_with_pictures_is_found(tmp_path):
    for name in (".hidden/1.png", "cache/1.npy", "notes/readme.txt", "owls/1.JPG", "rats/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert class_folder(tmp_path) == str(tmp_path / "owls")
    assert class_folder(tmp_path / "owls") is None
    assert class_folder(tmp_path / "not there") is None
