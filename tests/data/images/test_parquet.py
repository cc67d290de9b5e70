"""Parquet files of pictures, as the hub has them."""

import json
import os
import shutil
import sys

import numpy as np
import pytest
from data.images.picture_sources import load, write_source
from data.images.picture_trees import noise
from data.images.test_encoded import encoded
from PIL import Image

from utils.data.images import parquet
from utils.data.images.parquet import configuration_folder
from utils.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet as arrow  # noqa: E402


def png(seed):
    return encoded(Image.fromarray(noise(8, seed)), "PNG")


PICTURES = [png(i) for i in range(6)]


def write(path, columns, features=None, rows=4):
    """A file with these columns, whose metadata are the hub's."""
    table = pyarrow.table(columns)
    if features is not None:
        known = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": known})
    path.parent.mkdir(parents=True, exist_ok=True)
    arrow.write_table(table, path, row_group_size=rows)


def struct(pictures):
    return [{"bytes": picture, "path": "a.png"} for picture in pictures]


def refused(folder, *parts, **settings):
    with pytest.raises(UserError) as error:
        load("parquet", folder, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


LABELS = [0, 1, 0, 1, 1, 0]
NAMES = {"_type": "ClassLabel", "names": ["cat", "dog"]}


@pytest.mark.parametrize(
    "columns, features, classes",
    [
        ({"image": struct(PICTURES), "label": LABELS}, None, ["0", "1"]),
        ({"i": [3] * 6, "img": PICTURES, "fine_label": LABELS},
         {"img": {"_type": "Image"}, "fine_label": NAMES}, ["cat", "dog"]),
        ({"label": LABELS, "small": PICTURES[::-1], "image": struct(PICTURES), "target": [5] * 6},
         {"image": {"_type": "Image"}, "label": NAMES | {"names": {"0": "a", "1": "b"}}},
         ["a", "b"]),
        ({"image": PICTURES, "label": LABELS}, {"label": NAMES | {"names": ["crane", "crane"]}},
         ["crane (0)", "crane (1)"]),
        ({"x": pyarrow.array(PICTURES, pyarrow.large_binary()), "Class": LABELS}, {"x": 3},
         ["0", "1"]),
    ],
    ids=["plain", "names of CIFAR", "several", "names alike", "large"],
)  # fmt: skip
def test_columns(tmp_path, columns, features, classes):
    for split in ("train", "validation"):
        write(tmp_path / "set" / f"{split}.parquet", columns, features)
    data = load("parquet", tmp_path / "set")
    assert data.classes == classes and data.train.labels.tolist() == LABELS
    found = data.train.pictures.decode(np.arange(6))
    assert np.array_equal(found, [noise(8, i) for i in range(6)])


@pytest.mark.parametrize(
    "layout",
    ["data/{}-00001-of-00002.parquet", "{}/0001.parquet", "default/{}-00001-of-00002.parquet",
     "default/{}/0001.parquet", "default/partial-{}/0001.parquet"],
)  # fmt: skip
def test_layouts_of_the_hub(tmp_path, layout):
    for split in ("train", "validation", "test"):
        for second in (layout, layout.replace("0001", "0000", 1)):
            write(tmp_path / "set" / second.format(split), {"image": PICTURES, "label": LABELS})
    data = load("parquet", tmp_path / "set")
    assert (len(data.train), len(data.val), len(data.test)) == (12, 12, 12)
    assert ("has converted of a larger set (partial-train/" in data.source) is ("partial" in layout)


@pytest.mark.parametrize(
    "layout", ["data/{}-00000-of-00001.parquet", "default/{}/0000.parquet", "{}.parquet"]
)
def test_a_split_called_valid(tmp_path, layout):
    for split in ("train", "valid"):
        path = tmp_path / "set" / layout.format(split)
        write(path, {"image": PICTURES, "label": LABELS})
    assert load("parquet", tmp_path / "set").val_is_test


@pytest.mark.parametrize("layout", ["{}/train/0000.parquet", "{}/train-00000-of-00001.parquet"])
def test_one_of_several_configurations_must_be_named(tmp_path, layout):
    for name in "fedcba":
        write(tmp_path / "set" / layout.format(name), {"image": PICTURES, "label": LABELS})
    wanted = "6 configurations of a data set: give the folder of one, as in "
    refused(tmp_path / "set", wanted + f"--data_dir {tmp_path / 'set' / 'a'}", test_fraction=0.5)
    assert len(load("parquet", tmp_path / "set" / "b", test_fraction=0.5).train) == 3


def test_hidden_folders_are_no_configurations(tmp_path):
    for name in (".cache/x", "default"):
        write(tmp_path / "set" / name / "train/0.parquet", {"image": PICTURES, "label": LABELS})
    assert configuration_folder(tmp_path / "set") == tmp_path / "set" / "default"


def test_a_test_split_without_labels_is_left_out(tmp_path):
    for split, labels in (("train", LABELS), ("val", LABELS), ("test", [-1] * 6)):
        write(tmp_path / "set" / f"{split}.parquet", {"image": PICTURES, "label": labels})
    data = load("parquet", tmp_path / "set")
    assert data.val_is_test and data.val is None and len(data.test) == 6
    assert "without the test split (test.parquet, ...), which has no labels" in data.source
    assert "pictures in column image, classes in label" in data.source


def test_rows_without_a_picture_or_a_label(tmp_path):
    pictures, labels = struct(PICTURES), list(LABELS)
    pictures[1], pictures[2], labels[4] = None, {"bytes": None, "path": "a.png"}, None
    write(tmp_path / "set" / "train.parquet", {"image": pictures, "label": labels})
    write(tmp_path / "set" / "test.parquet", {"image": struct(PICTURES), "label": LABELS})
    refused(tmp_path / "set", "train.parquet, row 1", "no bytes")
    data = load("parquet", tmp_path / "set", on_bad="skip")
    assert data.skipped == 3 and data.train.labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "columns, problem",
    [
        ({"image": ["a", "b"], "label": [0, 1]}, "no column of pictures, as bytes"),
        ({"image": PICTURES[:2], "label": ["cat", "dog"]}, "no column of labels, as whole numbers"),
    ],
)
def test_columns_that_are_missing(tmp_path, columns, problem):
    write(tmp_path / "set" / "train.parquet", columns)
    refused(tmp_path / "set", "train.parquet", problem, "label (", test_fraction=0.5)


def test_a_file_with_other_columns(tmp_path):
    write(tmp_path / "set" / "train-0.parquet", {"image": PICTURES, "label": LABELS})
    write(tmp_path / "set" / "train-1.parquet", {"img": PICTURES, "label": LABELS})
    refused(tmp_path / "set", "train-1.parquet has no column 'image'", test_fraction=0.5)


def test_pyarrow_is_asked_for(tmp_path, monkeypatch):
    write(tmp_path / "set" / "train.parquet", {"image": PICTURES, "label": LABELS})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(tmp_path / "set", "pip install pyarrow", test_fraction=0.5)


def test_files_are_unpacked_again_where_one_has_changed(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    splits = {"train": [(png(i), i % 2) for i in range(4)], "test": [(png(9), 0), (png(8), 1)]}
    write_source("parquet", folder, splits)
    load("parquet", folder)
    read, rows = [], parquet._rows
    monkeypatch.setattr(parquet, "_rows", lambda *args: read.append(args[0].name) or rows(*args))
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "cache")
    load("parquet", folder)
    assert read == []
    write_source("parquet", folder, {"train": splits["train"][:3]})
    assert len(load("parquet", folder).train) == 3
    assert sorted(read) == ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"]
    assert len(list((tmp_path / "cache").glob("parquet-*/*.tar"))) == 4


def test_it_makes_no_difference_which_process_has_unpacked_a_file(tmp_path):
    """Of two that do it at once, one finds its file replaced by that of the other."""
    folder, rows = tmp_path / "set", [(png(i), i % 2) for i in range(4)]
    write_source("parquet", folder, {"train": rows, "test": rows[:2]})
    first = load("parquet", folder)
    for path in (tmp_path / "cache").glob("parquet-*/*.tar"):
        path.unlink()
    load("parquet", folder)
    found = first.train.pictures.decode(np.arange(4))
    assert np.array_equal(found, [noise(8, i) for i in range(4)])


def test_there_must_be_room(tmp_path, monkeypatch):
    write(tmp_path / "set" / "train.parquet", {"image": PICTURES, "label": LABELS})
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(tmp_path / "set", "0 MB free", "--cache_dir", test_fraction=0.5)


def test_a_row_group_is_not_read_at_once(tmp_path):
    pictures = [os.urandom(1 << 16) for _ in range(400)]
    table = pyarrow.table({"image": pictures, "label": [0] * 400})
    arrow.write_table(table, tmp_path / "large.parquet", write_batch_size=32)  # rows of a page
    before = pyarrow.total_allocated_bytes()
    columns = parquet.Columns("image", "label", None)
    most = 0
    for _ in parquet._rows(tmp_path / "large.parquet", columns):
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert 0 < most < 400 << 15  # half of the pictures
