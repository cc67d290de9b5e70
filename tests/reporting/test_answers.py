"""evaluated.csv, predictions.csv and splits.csv."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from utils.errors import UserError
from utils.measures.outcomes import MOST_CLASSES, answers_of
from utils.reporting.answers import (
    AnswerTable,
    SampleNames,
    table_file,
    write_evaluated,
    write_splits,
)

CLASSES = ["=1+1", 'a "b", c']


class Recorded:
    """As Outcomes has them, in two chunks."""

    def chunks(self):
        p = np.array([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]], np.float32)
        targets, losses = np.array([1, 0, 1]), np.array([0.2876821, 0.6931472, np.inf])
        for part in (slice(0, 2), slice(2, 3)):
            yield targets[part], losses[part], *answers_of(p[part])


def read(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


def test_a_row_for_each_evaluated_sample(tmp_path):
    names = SampleNames(["file"], lambda: iter([["a.png"], ["b.png"], ["c,d.png"]]))
    write_evaluated(tmp_path / "out.csv", Recorded(), CLASSES, "test", names)
    assert (tmp_path / "out.csv").read_bytes().startswith(b"\xef\xbb\xbf")
    found = read(tmp_path / "out.csv")
    head = ["file", "split", "true", "predicted", "probability"]
    assert found[0] == [*head, "p_=1+1", 'p_a "b", c', "loss"]
    assert found[1:] == [
        ["a.png", "test", 'a "b", c', 'a "b", c', "0.750000", "0.250000", "0.750000", "0.287682"],
        ["b.png", "test", "'=1+1", "'=1+1", "0.500000", "0.500000", "0.500000", "0.693147"],
        ["c,d.png", "test", 'a "b", c', "'=1+1", "1.000000", "1.000000", "0.000000", "inf"],
    ]


def test_texts_have_what_the_model_reads(tmp_path):
    texts = ["=SUM(1)", "two\nlines", "three"]
    names = SampleNames(
        ["file", "line", "id"], lambda: (["t.csv", str(i), "x"] for i in range(3)),
        lambda: iter(texts),
    )  # fmt: skip
    write_evaluated(tmp_path / "out.csv", Recorded(), CLASSES, "val", names)
    found = read(tmp_path / "out.csv")
    assert found[0][:5] == ["file", "line", "id", "text", "split"]
    assert [row[:5] for row in found[1:]] == [
        ["t.csv", str(i), "x", text, "val"]
        for i, text in enumerate(["'=SUM(1)", "two\nlines", "three"])
    ]


def test_of_many_classes_the_likeliest(tmp_path):
    classes = [f"c{i}" for i in range(MOST_CLASSES + 1)]
    p = np.zeros((1, len(classes)))
    p[0, [7, 3, 100, 0, 50]] = 0.5, 0.2, 0.15, 0.1, 0.05
    file = io.StringIO()
    table = AnswerTable(file, classes, ["file"])
    order, values = answers_of(p)
    table.answer(["a"], order[0], values[0])
    table.without_answer(["b"])
    head, first, second = csv.reader(io.StringIO(file.getvalue()))
    assert head[:5] == ["file", "predicted", "probability", "predicted_2", "probability_2"]
    assert first[1::2] == ["c7", "c3", "c100", "c0", "c50"]
    assert first[2::2] == ["0.500000", "0.200000", "0.150000", "0.100000", "0.050000"]
    assert second == ["b", *[""] * 10] and len(head) == len(second)


def test_splits(tmp_path):
    def names(*files):
        return SampleNames(["file"], lambda: ([file] for file in files))

    splits = {
        "train": (names("a", "b"), np.array([0, 1])),
        "val": (names("c"), np.array([1])),
    }
    write_splits(tmp_path / "splits.csv", splits, CLASSES)
    assert read(tmp_path / "splits.csv") == [
        ["file", "class", "split"], ["a", "'=1+1", "train"], ["b", 'a "b", c', "train"],
        ["c", 'a "b", c', "val"],
    ]  # fmt: skip


def test_a_table_is_whole_or_not_there(tmp_path):
    (tmp_path / "old.csv").write_text("old")
    with pytest.raises(KeyError), table_file(tmp_path / "old.csv") as file:
        file.write("new")
        raise KeyError
    assert (tmp_path / "old.csv").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UserError, match="cannot write"):
        table_file(tmp_path / "old.csv" / "x.csv").__enter__()
