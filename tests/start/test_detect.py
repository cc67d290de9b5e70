"""What lies at a place: pictures, texts, or neither, which is told in one line."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

from utils.errors import UserError
from utils.start.detect import detect

TEXTS = "label,text\n" + "a,the printer is not there\nb,see picture.jpg please again\n" * 3
LIST = "file,label\n" + 'x/1.JPG,a\n"2.png",b\n' * 3


def write(*paths: str) -> None:
    """Empty files; tables have what their names begin with."""
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"")


@pytest.fixture(autouse=True)
def in_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_folders_of_classes():
    write("tree/cats/1.jpg", "tree/dogs/2.PNG", "split/train/cats/1.jpg", "split/test/cats/2.jpg")
    for place in ("tree", "split", "split/train"):
        found = detect(place)
        assert (found.kind, found.flags) == (
            "pictures",
            {"dataset": "imagefolder", "data_dir": place},
        )


def test_tables_of_texts():
    Path("texts.csv").write_text(TEXTS)
    Path("texts.tsv.gz").write_bytes(gzip.compress(TEXTS.replace(",", "\t").encode()))
    Path("wide.csv").write_text(TEXTS, encoding="utf-16")
    for place in ("texts.csv", "texts.tsv.gz", "wide.csv"):
        found = detect(place)
        assert (found.kind, found.flags) == ("texts", {"dataset": "csv", "train_file": place})


def test_a_folder_of_tables():
    os.mkdir("data")
    Path("data/train.csv").write_text(TEXTS)
    assert detect("data").flags == {"dataset": "csv", "train_file": "data/train.csv"}
    Path("data/valid.jsonl").write_text("{}")
    Path("data/test.csv").write_text(TEXTS)
    assert detect("data").flags == {
        "dataset": "csv", "train_file": "data/train.csv", "val_file": "data/valid.jsonl",
        "test_file": "data/test.csv",
    }  # fmt: skip
    Path("data/val.csv").write_text(TEXTS)
    with pytest.raises(UserError, match=r"both val.csv and valid.jsonl"):
        detect("data")
    os.remove("data/val.csv")
    write("data/cats/1.jpg", "data/dogs/1.jpg")
    with pytest.raises(UserError, match=r"both a table of texts, train.csv, .* such as cats/"):
        detect("data")
    os.rename("data/train.csv", "data/tickets.csv")
    os.remove("data/test.csv")
    assert detect("data").words == "class folders (tickets.csv beside them is not read)"
    shutil.rmtree("data/cats")
    shutil.rmtree("data/dogs")
    with pytest.raises(UserError, match=r"2 tables: name one of tickets.csv, valid.jsonl"):
        detect("data")
    os.remove("data/valid.jsonl")
    assert detect("data").flags == {"dataset": "csv", "train_file": "data/tickets.csv"}


def test_lists_of_pictures():
    write("pictures/1.jpg")
    Path("list.csv").write_text(LIST)
    assert detect("list.csv").flags == {"dataset": "csv", "data_dir": "list.csv"}
    Path("pictures/train.csv").write_text(LIST.encode("utf-16").decode("latin-1"), "latin-1")
    found = detect("pictures")
    assert (found.kind, found.flags) == ("pictures", {"dataset": "csv", "data_dir": "pictures"})


@pytest.mark.parametrize("name", ["a.tar", "train/b.parquet", "c.tfrecord"])
def test_shards(name):
    write(f"shards/{name}")
    kind = name.rpartition(".")[2]
    assert detect("shards").flags == {"dataset": kind, "data_dir": "shards"}
    with pytest.raises(UserError, match="name the folder with the shards"):
        detect(f"shards/{name}")


def test_names():
    assert detect("shapes").flags == {"dataset": "shapes"} and detect("shapes").kind == "pictures"
    assert detect("ag_news").kind == "texts"
    write("shapes/cats/1.jpg")  # what is there counts more
    assert detect("shapes").flags == {"dataset": "imagefolder", "data_dir": "shapes"}


@pytest.mark.parametrize(
    ("paths", "place", "told"),
    [
        ([], "nowhere", "no such folder or file; built-in and published data are ag_news, "),
        ([], "csv", "no such folder or file"),
        (["data/1.jpg", "data/2.jpg"], "data", "2 pictures but no classes: put those of each"),
        (["data/notes.md"], "data", "neither folders of pictures.* it has notes.md"),
        (["data/.hidden"], "data", "it has nothing"),
        (["a.zip"], "a.zip", "unpack it"),
        (["a.xlsx"], "a.xlsx", r"save it as CSV \(UTF-8\)"),
        (["a.md"], "a.md", "name a folder of pictures, or a table"),
    ],
)
def test_what_cannot_be_trained_on(paths, place, told):
    write(*paths)
    with pytest.raises(UserError, match=told):
        detect(place)
