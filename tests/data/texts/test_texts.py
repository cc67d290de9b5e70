"""The user's own files and AG News as cleaned texts with classes."""

import csv
import hashlib
from dataclasses import replace

import numpy as np
import pytest
from data.texts.sum_of_texts import sum_of

from utils.data.texts import published_csv
from utils.data.texts.sources import TextRequest, open_text_data
from utils.errors import UserError

WORDS = ["alpha", "beta", "gamma", "delta"]


def write(path, labels, header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        if header:
            csv.writer(file).writerow(header)
        csv.writer(file).writerows(
            [label, f"{WORDS[i % 4]} text number {i} of {path.stem}"]
            for i, label in enumerate(labels)
        )
    return path


def load(folder, name="csv", **settings):
    return open_text_data(name, TextRequest(folder, **settings)).load()


def refused(folder, *parts, **settings):
    with pytest.raises(UserError) as error:
        load(folder, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_three_files(tmp_path):
    files = {
        f"{name}_file": write(tmp_path / f"{name}.csv", labels, header)
        for name, labels, header in (
            ("train", ["b", "a", "c", "a"] * 5, ["label", "text"]),
            ("test", ["c", "a"], None),
            ("val", ["a", "a", "b"], None),
        )
    }
    data = load(tmp_path, **files)
    assert data.classes == ["a", "b", "c"] and not data.synthetic and data.skipped == 0
    assert data.train.labels.tolist() == [1, 0, 2, 0] * 5
    assert data.test.labels.tolist() == [2, 0] and data.val.labels.tolist() == [0, 0, 1]
    assert data.val.texts[2] == "gamma text number 2 of val"
    assert "below a header row" in data.notes[0] and "no header row" in data.notes[1]
    assert sum_of(data) == sum_of(load(tmp_path, **files))
    write(tmp_path / "test.csv", ["c", "b"])
    assert sum_of(data) != sum_of(load(tmp_path, **files))


def test_numbers_are_sorted_as_numbers_and_take_the_names_beside_them(tmp_path):
    train = write(tmp_path / "train.csv", ["10", "9", "1"] * 4)
    assert load(tmp_path, train_file=train, test_fraction=0.5).classes == ["1", "9", "10"]
    (tmp_path / "classes.txt").write_text("\n".join(f"class {i}" for i in range(1, 11)))
    data = load(tmp_path, train_file=train, test_fraction=0.5)
    assert data.classes == ["class 1", "class 9", "class 10"] and "classes.txt" in data.notes[-1]
    (tmp_path / "classes.txt").write_text("too\nfew\n")
    assert load(tmp_path, train_file=train, test_fraction=0.5).classes == ["1", "9", "10"]
    zero = write(tmp_path / "zero.csv", ["0", "1"] * 4)
    assert load(tmp_path, train_file=zero, test_fraction=0.5).classes == ["too", "few"]


@pytest.mark.parametrize(
    ("labels", "names", "expected", "note"),
    [
        ("12", "Money Sport Tech", "1 2", "for the whole numbers from 1 to 2"),
        ("12", "Money Sport", "Money Sport", "whose first line is class 1"),
        ("02", "Money Sport Tech News", "Money Tech", "whose first line is class 0"),
        ("12", "Money Sport Tech News", "1 2", "for the whole numbers from 1 to 2"),
        ("13", "Money Sport", "1 3", "from 1 to 3"),
        ("03", "Money Sport Tech", "0 3", "from 0 to 3"),
        ("12", "Money Money", "1 2", "it needs a name of its own on each line"),
        ("12", "\udce9 b", "1 2", "line 1 is not UTF-8: name the file's encoding"),
        (["1.0", "2.0"], "Money Sport", "1.0 2.0", "for the whole numbers from 1 to 2"),
        ("ab", "Money Sport", "a b", None),
    ],
)
def test_names_for_classes_that_are_numbers(tmp_path, labels, names, expected, note):
    train = write(tmp_path / "train.csv", list(labels) * 4)
    lines = "\n".join(names.split()).encode("utf-8", "surrogateescape")
    (tmp_path / "classes.txt").write_bytes(lines)
    data = load(tmp_path, train_file=train, test_fraction=0.5)
    assert data.classes == expected.split()
    said = [line for line in data.notes if "classes.txt beside train.csv" in line]
    assert [note in line for line in said] == [True] * (note is not None)


@pytest.mark.parametrize(("one", "other"), [(("0.0", "1.0"), "01"), ("01", ("0.0", "1.0"))])
def test_whole_numbers_as_pandas_writes_them(tmp_path, one, other):
    train, test = write(tmp_path / "train.csv", [*one] * 4), write(tmp_path / "test.csv", other)
    data = load(tmp_path, train_file=train, test_file=test)
    assert data.classes == [*one] and data.test.labels.tolist() == [0, 1]
    write(test, ["0", "1.5"])
    refused(tmp_path, "has the class '1.5'", train_file=train, test_file=test)
    write(train, ["0", "a"] * 4)
    write(test, ["0.0", "a"])
    refused(tmp_path, "has the class '0.0'", train_file=train, test_file=test)


def test_a_header_of_unknown_names_is_asked_for(tmp_path):
    train = write(tmp_path / "train.csv", ["a", "b"] * 3, ["thema", "inhalt"])
    given = {"train_file": train, "test_fraction": 0.5}
    refused(tmp_path, "('thema' and 'inhalt')", "--header", "--no_header", **given)
    for answer in ({"label_column": "thema"}, {"header": True}):
        assert load(tmp_path, **given, **answer).classes == ["a", "b"]
    refused(tmp_path, "class 'thema' has only one sample", **given, header=False)
    one = write(tmp_path / "one.csv", ["c", *["a", "b"] * 3], ["label", "text"])
    with pytest.raises(UserError, match=r"class 'c' has only one sample.*add samples") as error:
        load(tmp_path, train_file=one, test_fraction=0.5)
    assert "header" not in str(error.value)


def test_texts_that_are_also_in_the_part_held_out(tmp_path):
    train = write(tmp_path / "train.csv", ["a", "b"] * 20)
    train.write_text(train.read_text() * 2)
    data = load(tmp_path, train_file=train, test_fraction=0.25)
    known = set(data.train.texts)
    count = sum(text in known for text in data.test.texts)
    assert f"the test texts held out: {count} of 20 texts are in the training" in data.notes[-1]
    assert count


def test_a_fraction_becomes_the_test_set(tmp_path):
    train = write(tmp_path / "train.csv", ["a"] * 60 + ["b"] * 20)
    data = load(tmp_path, train_file=train, test_fraction=0.25)
    assert np.bincount(data.train.labels).tolist() == [45, 15]
    assert np.bincount(data.test.labels).tolist() == [15, 5]
    assert len(set(data.train.texts) | set(data.test.texts)) == 80
    again, other = (load(tmp_path, train_file=train, test_fraction=f) for f in (0.25, 0.5))
    assert sum_of(data) == sum_of(again) != sum_of(other)


def test_a_class_that_the_training_file_lacks(tmp_path):
    train = write(tmp_path / "train.csv", ["a", "b"] * 5)
    test = write(tmp_path / "test.csv", ["a", "b", "a", "z"])
    files = {"train_file": train, "test_file": test}
    refused(tmp_path, "test.csv: line 4 has the class 'z'", "--on_bad skip", **files)
    data = load(tmp_path, on_bad="skip", max_bad=0.25, **files)
    assert data.skipped == 1 and len(data.test) == 3
    assert "test.csv: 1 bad row left out" in data.notes[-1] and "line 4" in data.notes[-1]
    assert data.notes[-1].endswith("1 (all) of class 'z'")


def test_what_is_refused(tmp_path):
    train = write(tmp_path / "train.csv", ["a", "b"] * 5)
    one = write(tmp_path / "one.csv", ["a"] * 6)
    refused(tmp_path, "needs --train_file")
    refused(tmp_path, "needs a test set", "--test_fraction", train_file=train)
    refused(tmp_path, "--test_file is the training file", train_file=train, test_file=train)
    refused(tmp_path, "gone.csv is not there", train_file=train, test_file=tmp_path / "gone.csv")
    refused(tmp_path, "only one class, 'a'", train_file=one, test_fraction=0.5)
    many = write(tmp_path / "many.csv", [f"class{i}" for i in range(30)])
    refused(tmp_path, "30 classes for 30", train_file=many, test_fraction=0.5, header=False)
    refused(tmp_path, "between 0 and 1", train_file=train, test_fraction=1.0)


def test_joined_files_and_texts_in_both(tmp_path):
    train = write(tmp_path / "train.csv", ["a", "b"] * 5, ["label", "text"])
    lines = train.read_text().splitlines()
    train.write_text("\n".join(lines + lines[:3]))
    (tmp_path / "test.csv").write_text(f"{lines[1]}\na,something else\n")
    files = {"train_file": train, "test_file": tmp_path / "test.csv"}
    refused(tmp_path, "train.csv: line 12 is the header row once more", **files)
    data = load(tmp_path, on_bad="skip", max_bad=0.1, **files)
    assert data.classes == ["a", "b"] and data.skipped == 1 and len(data.train) == 12
    assert "test.csv: 1 of 2 texts are in the training data, too" in data.notes[-1]


# AG News


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A small AG News that passes for the published one."""
    folder = tmp_path / "published"
    write(folder / "train.csv", "12341234")
    with open(folder / "test.csv", "w", encoding="utf-8") as file:
        file.write('"1","a title","Bush #39;s text"\n"4","b title","more\\text"\n')
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    small = replace(published_csv.PUBLISHED["ag_news"], sums=sums)
    monkeypatch.setitem(published_csv.PUBLISHED, "ag_news", small)
    return folder


@pytest.mark.parametrize("below", [".", "ag_news_csv"])
def test_ag_news_is_found_in_either_folder(published, tmp_path, no_network, below):
    folder = tmp_path / "data"
    (folder / below).mkdir(parents=True)
    for path in published.iterdir():
        path.rename(folder / below / path.name)
    data = load(folder, "ag_news")
    assert data.classes == ["World", "Sports", "Business", "Sci/Tech"]
    assert data.train.labels.tolist() == [0, 1, 2, 3] * 2 and data.test.labels.tolist() == [0, 3]
    assert data.test.texts == ["a title Bush's text", "b title more text"]
    described = open_text_data("ag_news", TextRequest(folder)).description
    assert len(data.notes) == 2 and described == str(folder / below)
    write(folder / below / "train.csv", "1234")
    assert "train.csv: not the published file" in load(folder, "ag_news").notes[-1]


def test_ag_news_is_downloaded_and_checked(published, tmp_path, monkeypatch):
    fetched = []

    def download(url, path, checksum, *, hint):
        fetched.append((url, checksum))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((published / path.name).read_bytes())

    monkeypatch.setattr(published_csv, "download", download)
    source = open_text_data("ag_news", TextRequest(tmp_path / "new"))
    assert source.description == str(tmp_path / "new" / "ag_news_csv")
    ag_news = published_csv.PUBLISHED["ag_news"]
    assert fetched == [(ag_news.url + name, ag_news.sums[name]) for name in published_csv.FILES]
    load(tmp_path / "new", "ag_news")
    assert len(fetched) == 2


def test_ag_news_without_network(tmp_path, no_network):
    refused(tmp_path, "no network", "--data_dir", "--dataset headlines", name="ag_news")


def test_ag_news_with_a_fifth_class(published, no_network):
    write(published / "train.csv", "12345")
    refused(published, "train.csv: line 5 has the class '5'", name="ag_news")


@pytest.mark.real_data
def test_real_ag_news(real_texts, no_network):
    data = load(real_texts, "ag_news")
    assert data.classes == ["World", "Sports", "Business", "Sci/Tech"] and data.skipped == 0
    assert len(data.test) == 7600 and np.bincount(data.test.labels).tolist() == [1900] * 4
    assert len(data.train) > 10_000 and all(data.train.texts)
    # The class is in column 1 of each file; the columns of text may differ.
    assert all("class in column 1" in note for note in data.notes[:2])
