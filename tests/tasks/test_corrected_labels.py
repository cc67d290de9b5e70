"""Doubtful labels, from a run's table to the data of the next one: --labels."""

import csv
from pathlib import Path

import numpy as np
import pytest
from data.images.picture_trees import make_tree
from quick_runs import handlers_put_back, quick

import resnet50_test
import transformer_test
from utils.data.texts.sources import TextData, TextRequest, Texts, open_text_data, relabel
from utils.errors import UserError
from utils.measures.findings import Doubt
from utils.runs import report

PICTURES = "--depth 18 --width 4 --image_size 8 --batch_size 8 --workers 0"
TEXTS = (
    "--dataset csv --test_file test.csv --layers 1 --dim 16 --heads 2 --ffn 16 --max_len 8 "
    "--vocab_size 300 --batch_size 8"
)


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """run(flags) -> what a run of two steps prints, in a new folder, of pictures or texts."""
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def start(flags: str) -> str:
        of_texts = "--train_file" in flags or flags.startswith("--resume texts")
        main, base = (transformer_test.main, TEXTS) if of_texts else (resnet50_test.main, PICTURES)
        base = f"{base} --device cpu --threads 1 --cache_dir cache --max_steps 2"
        with handlers_put_back():
            main(f"{'' if '--resume' in flags else base} {flags}".split())
        return "".join(capfd.readouterr())

    return start


def table(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def write(path: str, rows: list[list], **how) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, **how).writerows(rows)


def classes_of(path: str) -> dict[str, str]:
    """File or line -> class, of a run."""
    rows = table(f"{path}/splits.csv")
    return {row.get("line") or row["file"]: row["class"] for row in rows}


def has_doubts(patch, samples: list[int]) -> None:
    """The runs have time to look for doubtful labels, and find these."""
    patch.setattr(report, "spare_seconds", lambda trainer: 1e9)
    found = [Doubt(sample, 0, 1, 0.9, 0.1) for sample in samples]
    patch.setattr(report, "doubtful", lambda outcomes: found)


def test_class_folders_from_the_table_of_one_run_to_the_next(run, monkeypatch):
    pytest.importorskip("cleanlab")
    make_tree(Path("data"), classes=("=cat", "dog"))
    has_doubts(monkeypatch, [2, 0])
    of_data = "--dataset imagefolder --data_dir data"
    assert "2 doubtful labels of 8: one/labels_to_check.csv" in run(f"{of_data} --output one")
    first, second = table("one/labels_to_check.csv")
    assert first == {
        "file": "data/test/=cat/002.png", "split": "test", "true": "'=cat", "suggested": "dog",
        "quality": "0.100000", "label": "'=cat",
    }  # fmt: skip
    assert second["file"].endswith("000.png")
    # As a spreadsheet saves it elsewhere.
    rows = [
        ["file", "true", "label"],
        [first["file"], "'=cat", "dog"],
        ["train/dog/001.png", "", ""],
    ]
    rows.append([second["file"], second["true"], second["label"]])
    write("corrected.csv", rows, delimiter=";", lineterminator="\r\n")
    said = run(f"{of_data} --output two --labels corrected.csv")
    assert (
        "note: --labels corrected.csv: another label for 0 of 8 train (1 left out), 1 of 8 test "
        "samples" in said
    )
    before, after = classes_of("one"), classes_of("two")
    assert after.pop("data/test/=cat/002.png") == "dog" != before.pop("data/test/=cat/002.png")
    assert before.pop("data/train/dog/001.png") == "dog" and after == before
    assert {row["file"]: row["true"] for row in table("two/evaluated.csv")}[first["file"]] == "dog"
    # The content of the table is that of the data.
    Path("corrected.csv").rename("moved.csv")
    assert "run folder two" in run("--resume two --max_steps 3 --labels moved.csv")
    write("moved.csv", rows[:2])
    said = run("--resume two --max_steps 4 --labels moved.csv")
    assert "error: these are not the data that the run in two was trained on" in said
    assert "--labels" in said.splitlines()[-1]


def test_a_run_that_is_short_has_no_such_table(run, monkeypatch):
    make_tree(Path("data"))
    monkeypatch.setattr(report, "doubtful", None)
    assert "doubtful" not in run("--dataset imagefolder --data_dir data --output one")
    has_doubts(monkeypatch, [])
    monkeypatch.setattr(report, "left_out", lambda *what: f"note: without {' and '.join(what)}")
    assert "note: without cleanlab and doubtful" in run("--resume one --max_steps 3")


def test_a_list_of_pictures_in_other_words(run):
    make_tree(Path("data"), splits=("all",), classes=("007", "008"))
    rows = [[f"all/{name}/{n:03}.png", name] for name in ("007", "008") for n in range(4)]
    write("data/train.csv", [["file", "label"], *rows[:3], *rows[4:7]])
    write("data/test.csv", [["file", "label"], rows[3], rows[7]])
    write("corrected.csv", [["File", "Label"], ["all/007/003.png", "8"]])  # of a spreadsheet
    for decode in ("once", "always"):
        flags = f"--dataset csv --data_dir data --decode {decode} --labels corrected.csv"
        said = run(f"{flags} --output {decode}")
        assert "another label for 0 of 6 train, 1 of 2 test samples" in said
        assert classes_of(decode)["data/all/007/003.png"] == "008"


def test_a_table_of_texts(run, monkeypatch):
    pytest.importorskip("cleanlab")
    words = {"cat": "fur and paw", "dog": "bark and bone"}
    rows = [[f"{words[name]}, {n}", name] for n in range(12) for name in words]
    write("train.csv", [["text", "label"], *rows])
    write("test.csv", [["text", "label"], *rows[:8]])
    has_doubts(monkeypatch, [5])
    flags = "--train_file train.csv --val_fraction 0.25 --id_columns label"
    run(f"{flags} --output texts")
    (row,) = table("texts/labels_to_check.csv")
    assert [*row] == [
        "file", "line", "label_in_file", "text", "split", "true", "suggested", "quality", "label",
    ]  # fmt: skip
    assert (row["line"], row["label"], row["suggested"]) == ("7", "cat", "dog")
    write(
        "corrected.csv", [["label", "line", "file"], ["cat", 7, "test.csv"], ["", 2, "train.csv"]]
    )
    monkeypatch.setattr("utils.runs.baseline.FRACTION", 1e9)
    for again in ("", "-again"):  # the second one from the cache
        said = run(f"{flags} --labels corrected.csv --output texts-2{again}")
        assert (
            "--labels corrected.csv: another label for 0 of 24 train (1 left out), 1 of 8 test "
            "samples" in said
        )
        assert "TF-IDF" in said and "is left out" not in said
        assert len(table(f"texts-2{again}/splits.csv")) == 31
    (changed,) = (row for row in table("texts-2/evaluated.csv") if row["line"] == "7")
    assert changed["true"] == "cat" and changed["label_in_file"] == "dog"
    said = run("--resume texts --eval_data test.csv --labels corrected.csv")
    assert "corrected.csv, line 3 names train.csv line 2, which is no sample" in said
    write("corrected.csv", [["label", "line", "file"], ["cat", 7, "test.csv"]])
    said = run("--resume texts --eval_data test.csv --labels corrected.csv")
    assert "another label for 1 of 8 test samples" in said and "error" not in said


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([["t.csv", "2", "bird"]], "line 2 has the label 'bird', which is none of cat, dog: corr"),
        ([["t.csv", "9", "cat"]], "line 2 names t.csv line 9, which is no sample of these data:"),
        ([["u.csv", "2", "cat"]], "line 2 names u.csv line 2, which"),
        (
            [["t.csv", "2", "dog"], ["./t.csv", "2", "dog"], ["t.csv", "2", "cat"]],
            "line 4 has another label for t.csv than line 2: correct it, or remove it",
        ),
        ([["t.csv", "2"]], "line 2 has 2 columns where the others have 3: correct it"),
        ([["t.csv", str(n), ""] for n in (2, 4)], "leaves too few train samples: every class"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, monkeypatch, rows, told):
    monkeypatch.chdir(tmp_path)
    texts = Texts(["a"] * 4, np.array([0, 1, 0, 1]), lines=np.array([2, 3, 4, 5]))
    data = TextData(["cat", "dog"], texts, texts.part(np.arange(4)))
    request = TextRequest(Path(), labels=Path("c.csv"))
    more = [["t.csv", "3", "dog"]] * 3
    for head, rest, fault in (
        (["file", "line", "label"], [*rows, *more], told),
        (["file", "label"], [row[::2] for row in more], "needs the columns label, file, line, as"),
    ):
        write("c.csv", [head, *rest])
        with pytest.raises(UserError) as caught:
            relabel(data, {"train": Path("t.csv")}, request)
        assert str(caught.value).startswith("c.csv") and fault in str(caught.value)
        assert "\n" not in str(caught.value)


def test_samples_without_names_are_refused(run):
    write("corrected.csv", [["number", "label"], ["3", "circle"]])
    said = run("--dataset shapes --labels corrected.csv")
    assert "error: --labels is for your own files and tables: leave it out" in said
    request = TextRequest(Path(), labels=Path("corrected.csv"))
    with pytest.raises(UserError, match="--labels is for your own files and tables"):
        open_text_data("headlines", request).load()
