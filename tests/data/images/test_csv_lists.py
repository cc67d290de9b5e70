"""Lists of picture files and their classes: --dataset csv."""

from unicodedata import normalize

import numpy as np
import pytest
from data.images.picture_trees import noise
from PIL import Image

from utils.data.images.sources import load_image_data
from utils.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Eight pictures in a folder, and no list."""
    (tmp_path / "set" / "images").mkdir(parents=True)
    for i in range(8):
        Image.fromarray(noise(8, i)).save(tmp_path / "set" / "images" / f"{i}.png")
    return tmp_path / "set"


def load(path, **settings):
    settings = {"cache_dir": path.parent / "cache", "workers": 2, "progress": False} | settings
    return load_image_data("csv", data_dir=path, **settings)


def refused(path, *parts, **settings):
    with pytest.raises(UserError) as error:
        load(path, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


def write(path, rows, header="file,label"):
    path.write_text("\n".join([header, *rows] if header else rows) + "\n")


ROWS = [f"images/{i},{'dog' if i % 2 else 'cat'}".replace(",", ".png,") for i in range(8)]


@pytest.mark.parametrize("decode", ["once", "always"])
def test_lists_of_each_split(folder, decode):
    write(folder / "train.csv", ROWS[:4])
    write(folder / "val.csv", ROWS[4:6])
    data = load(folder, decode=decode)
    assert data.classes == ["cat", "dog"] and data.val_is_test and data.name == "csv"
    assert data.train.labels.tolist() == [0, 1, 0, 1] and data.test.labels.tolist() == [0, 1]
    write(folder / "test.csv", ROWS[:1:-1])
    data = load(folder / "train.csv", decode=decode)  # those beside it count, too
    assert len(data.val) == 2 and data.test.labels.tolist() == [1, 0, 1, 0, 1, 0]
    if decode == "once":
        assert np.array_equal(data.test.images, [noise(8, i) for i in range(7, 1, -1)])


@pytest.mark.parametrize("decode", ["once", "always"])
def test_all_of_a_list_is_for_a_trained_model(folder, decode):
    """Also of one beside others; with some of the model's classes, in the model's order."""
    write(folder / "train.csv", ROWS)
    write(folder / "test.csv", ["images/1.png,dog", "images/3.png,dog"])
    model = {"classes": ["eel", "dog", "cat"], "decode": decode}
    data = load(folder / "train.csv", **model)
    assert data.classes == model["classes"] and data.test.labels.tolist() == [2, 1] * 4
    assert load(folder / "test.csv", **model).test.labels.tolist() == [1, 1]
    write(folder / "test.csv", ["images/1.png,dog", "images/3.png,ox", "images/4.png,yak"])
    refused(folder / "test.csv", "2 labels", "'ox' in line 3, 'yak' in line 4", **model)


def test_columns_are_told_and_another_encoding_is_asked_for(folder):
    (folder / "images" / "0.png").rename(folder / "images" / "ö.png")
    rows = [ROWS[0].replace("0", "ö"), *ROWS[1:]]
    (folder / "any.csv").write_bytes("\n".join(["file,label", *rows]).encode("cp1252"))
    refused(folder / "any.csv", "line 2 is not UTF-8", "'images/ö.png,cat'", test_fraction=0.25)
    data = load(folder / "any.csv", test_fraction=0.25, encoding="cp1252")
    assert len(data.train) == 6 and data.skipped == 0
    told = "any.csv with files in column 1 (file) and classes in 2 (label), read as cp1252"
    assert told in data.source


@pytest.mark.parametrize("word", ["valid", "validation"])
def test_other_names_of_val(folder, word):
    write(folder / "train.csv", ROWS[:4])
    write(folder / f"{word}.csv", ROWS[4:6])
    assert load(folder).val_is_test
    write(folder / "test.csv", ROWS[6:])
    data = load(folder / "train.csv")
    assert len(data.val) == 2 and len(data.test) == 2
    write(folder / "val.tsv", ROWS[4:6])
    refused(folder, f"both val.tsv and {word}.csv")


def test_a_test_list_without_labels(folder):
    """As of a competition."""
    write(folder / "train.csv", ROWS[:4])
    write(folder / "test.csv", ["images/6.png", "images/7.png"], "image_id")
    refused(folder, "test.csv has the columns image_id", "or move the list away")
    write(folder / "val.csv", ROWS[4:6])
    data = load(folder)
    assert data.val_is_test and len(data.test) == 2
    assert "without test.csv, which has no labels" in data.source
    write(folder / "val.csv", ["images/6.png"], "image_id")
    refused(folder, "val.csv has the columns image_id")


def test_a_list_that_is_named(folder):
    write(folder / "any.csv", ROWS)
    data = load(folder / "any.csv", test_fraction=0.25)
    assert (len(data.train), len(data.test)) == (6, 2)
    assert "a fifth is held out as test set" in load(folder / "any.csv").source
    refused(folder, "has no train.csv")
    refused(folder / "nothing.csv", "nothing.csv is not there")


@pytest.mark.parametrize(
    "name, header, row",
    [
        ("train.csv", "id;Label;extra;Image_Path", "7;{label};x,y;images/{i}.png"),
        ("train.tsv", "class id\tfilename\tclass_name", "{i}\timages/{i}.png\t{label}"),
        ("train.csv", '"label","image"', '"{label}","images/{i}.png"'),
        ("train.csv", None, "images/{i}.png,{label}"),
        ("train.csv", None, "{label} , images/{i}.png"),
        ("train.csv", "path,category", "{folder}/images/{i}.png,{label}"),  # absolute
    ],
)
def test_columns_and_delimiters(folder, name, header, row):
    names = ["a cat", "dog"]
    rows = [row.format(i=i, label=names[i % 2], folder=folder) for i in range(8)]
    write(folder / name, rows, header)
    write(folder / "test.csv", ROWS[:1], "file,label")
    refused(folder, "test.csv has 1 label", "'cat' in line 2")
    write(folder / "test.csv", ["images/3.png,a cat"], "file,label")
    data = load(folder)
    assert data.classes == names and data.train.labels.tolist() == [0, 1] * 4
    assert np.array_equal(data.train.images, [noise(8, i) for i in range(8)])


def test_numbers_are_sorted_as_such_and_may_have_names(folder):
    write(folder / "train.csv", [f"images/{i}.png,{(2, 10)[i % 2]}" for i in range(6)])
    write(folder / "test.csv", ["images/7.png,10"])
    assert load(folder).classes == ["2", "10"]
    (folder / "classes.txt").write_text("".join(f"class {i}\n" for i in range(11)))
    data = load(folder)
    assert data.classes == ["class 2", "class 10"] and data.test.labels.tolist() == [1]


def test_names_that_are_alike_get_their_numbers(folder):
    write(folder / "train.csv", [f"images/{i}.png,{(0, 3, 4)[i % 3]}" for i in range(6)])
    write(folder / "test.csv", ["images/7.png,4"])
    (folder / "classes.txt").write_text("crane\nmaillot\nmaillot\nox\ncrane\n")
    assert load(folder).classes == ["crane (0)", "ox", "crane (4)"]


@pytest.mark.parametrize("decode", ["once", "always"])
def test_a_file_that_is_listed_twice(folder, decode):
    """No picture gets into both splits; in a training list repeats may be meant."""
    write(folder / "any.csv", [*ROWS, *ROWS, f"./{ROWS[0]}", f"{folder}/{ROWS[1]}"])
    data = load(folder / "any.csv", test_fraction=0.25, decode=decode)
    assert (len(data.train), len(data.test)) == (6, 2)
    assert "without 10 repeated lines of any.csv" in data.source
    write(folder / "any.csv", ROWS)
    alone = load(folder / "any.csv", test_fraction=0.25, decode=decode)
    assert alone.fingerprint == data.fingerprint and "repeated" not in alone.source
    write(folder / "train.csv", [*ROWS[:4], ROWS[1]])
    write(folder / "test.csv", [*ROWS[4:], ROWS[4]])
    data = load(folder, decode=decode)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 1] and len(data.test) == 5
    assert "with 1 repeated line of train.csv" in data.source


def test_another_class_of_the_same_file_is_noticed(folder):
    write(folder / "test.csv", ROWS)
    for decode in ("once", "always"):
        write(folder / "train.csv", ROWS)
        first = load(folder, decode=decode)
        write(folder / "train.csv", [*ROWS[:7], "images/7.png,cat"])
        second = load(folder, decode=decode)
        assert second.fingerprint != first.fingerprint and second.train.labels[7] == 0


@pytest.mark.parametrize(
    "rows, header, problem",
    [
        ([], "file,label", "lists no pictures"),
        ([], None, "is empty: give a file with a row for each picture"),
        (["images/1.png,cat", "images/2.png"], "file,label", "line 3 has 1 columns"),
        (["images/1.png,cat", "images/2.png,"], "file,label", "line 3 has no label"),
        ([",cat"], "file,label", "line 2 has no file"),
        (['"images/1.png,cat'], "file,label", "line 2 has a quote that is never closed"),
        (["images/1.png,cat"], "file,label", "has only the class 'cat'"),
        (["1.png,cat", "2.png,dog"], "file,label", "none of which is there"),
        (["images\\1.png,cat", "images\\2.png,dog"], "file,label", "write / instead of \\ "),
        ([f"{300 * 'w'},cat"], None, "name that of the pictures' files 'file'"),
        (["images/1.png,cat"], "where,what,why", "has the columns where, what, why: name that"),
        (["images/1.png,cat", "a\0b,dog"], "file,label", "a b"),
        (
            [*ROWS[:2], "images/../images/0.png,dog"],
            "file,label",
            "lines 2 and 4 give images/../images/0.png the labels 'cat' and 'dog'",
        ),
    ],
)
def test_what_is_wrong_with_a_list(folder, rows, header, problem):
    write(folder / "train.csv", rows, header)
    if not rows and not header:
        (folder / "train.csv").write_text("")
    refused(folder, folder, problem, test_fraction=0.5)


def test_a_file_that_is_not_there_is_a_bad_picture(folder):
    write(folder / "train.csv", [*ROWS, "images/9.png,cat", "images,cat"])
    write(folder / "test.csv", ROWS[:2])
    for decode in ("once", "always"):
        refused(folder, "9.png", "No such file", "--on_bad skip", decode=decode)
        data = load(folder, decode=decode, on_bad="skip")
        assert data.skipped == 2 and len(data.train) == 8


def test_two_unicode_forms_of_a_label_are_one_class(folder):
    forms = [normalize(form, "café") for form in ("NFC", "NFD")]
    rows = [f"images/{i}.png,{[*forms, 'bar'][i % 3]}" for i in range(6)]
    write(folder / "train.csv", rows)
    write(folder / "test.csv", [f"images/6.png,{forms[1]}"])
    data = load(folder)
    assert data.classes == ["bar", forms[0]] and data.train.labels.tolist() == [1, 1, 0] * 2
    assert data.test.labels.tolist() == [1] and "two Unicode forms" in data.notes[0]
    write(folder / "train.csv", [row for row in rows if forms[0] not in row])
    assert load(folder).classes == ["bar", forms[1]]  # as before
