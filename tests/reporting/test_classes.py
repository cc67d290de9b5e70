"""The per-class report: right figures, tables for spreadsheets, a picture at any size."""

import csv
import warnings

import numpy as np
import pytest
from PIL import Image

from utils.errors import UserError
from utils.measures.compute import class_scores, margins
from utils.reporting.classes import (
    draw_confusions,
    draw_mean_lambda,
    plotted_names,
    summary_lines,
    write_class_report,
)
from utils.reporting.plots import save_figure

MATRIX = np.array([[8, 2, 0], [1, 9, 0], [0, 5, 15]])
NAMES = ["cat", "dog", "horse"]


def table(path) -> list[list[str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


def test_scores_against_their_definitions():
    """By counting samples."""
    true = np.repeat(np.arange(3), MATRIX.sum(1))
    predicted = np.concatenate([np.repeat(np.arange(3), row) for row in MATRIX])
    scores = class_scores(margins(MATRIX))
    for i in range(3):
        recall = (predicted[true == i] == i).mean()
        precision = (true[predicted == i] == i).mean()
        assert scores["recall"][i] == pytest.approx(recall)
        assert scores["precision"][i] == pytest.approx(precision)
        f1 = 2 * precision * recall / (precision + recall)
        assert scores["f1"][i] == pytest.approx(f1)


def test_the_tables_hold_figures_and_confusions(tmp_path):
    write_class_report(MATRIX, NAMES, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "confusion.csv",
        "confusion.png",
        "per_class.csv",
    ]
    rows = table(tmp_path / "per_class.csv")
    assert rows[0][:3] == ["class", "samples", "recall"]
    assert rows[1] == ["cat", "10", "0.8000", "0.8889", "0.8421", "dog", "2"]
    assert rows[3] == ["horse", "20", "0.7500", "1.0000", "0.8571", "dog", "5"]
    rows = table(tmp_path / "confusion.csv")
    assert rows[0][1:] == NAMES
    assert [[int(cell) for cell in row[1:]] for row in rows[1:]] == MATRIX.tolist()


def test_a_class_without_samples_has_no_recall(tmp_path):
    matrix = np.array([[5, 1, 0], [0, 0, 0], [0, 0, 4]])
    write_class_report(matrix, NAMES, tmp_path)
    rows = table(tmp_path / "per_class.csv")
    # It was predicted once, wrongly: precision and F1 are 0, recall cannot be measured.
    assert rows[2] == ["dog", "0", "", "0.0000", "0.0000", "", ""]
    lines = summary_lines(matrix, NAMES)
    assert "dog 0" not in lines[0] and "worst classes of 2" in lines[0]
    assert lines[-1] == "without samples: 1 of 3 classes"


def test_a_class_neither_seen_nor_predicted_has_no_figures(tmp_path):
    write_class_report(np.array([[3, 0], [0, 0]]), ["a", "b"], tmp_path)
    assert table(tmp_path / "per_class.csv")[2] == ["b", "0", "", "", "", "", ""]


def test_a_matrix_of_zeros_is_reported(tmp_path):
    empty = np.zeros((2, 2), np.int64)
    write_class_report(empty, ["a", "b"], tmp_path)
    assert summary_lines(empty, ["a", "b"]) == []


def test_summary_names_the_worst_and_the_most_frequent_confusions():
    assert summary_lines(MATRIX, NAMES, count=2) == [
        "worst classes of 3: horse 75.0 %, cat 80.0 %",
        "most frequent confusions: horse taken for dog (5 times), cat taken for dog (2 times)",
    ]
    once = summary_lines(np.array([[3, 1, 0], [0, 3, 0], [0, 0, 2]]), NAMES)
    assert once[1] == "most frequent confusions: cat taken for dog (1 time)"
    assert summary_lines(np.eye(3, dtype=np.int64), NAMES) == []  # nothing was confused
    assert summary_lines(MATRIX[:2, :2], NAMES[:2]) == []  # the accuracy tells nearly as much


NASTY = ["a,b", 'say "x"', "two\nlines", "=1+1", "@SUM(A1)", "-x", "Größe 猫", "caf\udce9", "$x^{$"]


def test_names_that_a_spreadsheet_or_a_plot_could_misread(tmp_path):
    matrix = np.eye(len(NASTY), dtype=np.int64) + 1
    write_class_report(matrix, NASTY, tmp_path)
    for name, rows in (
        ("per_class.csv", [row[0] for row in table(tmp_path / "per_class.csv")[1:]]),
        ("confusion.csv", table(tmp_path / "confusion.csv")[0][1:]),
    ):
        assert rows[:3] == NASTY[:3], name
        assert rows[3:6] == ["'=1+1", "'@SUM(A1)", "'-x"], name
        assert rows[6] == "Größe 猫", name
    assert all("\n" not in line for line in summary_lines(matrix, NASTY))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 10, 60, 100, 1000])
@pytest.mark.filterwarnings("error")
def test_picture_at_any_number_of_classes(tmp_path, count):
    generator = np.random.default_rng(0)
    matrix = generator.integers(0, 2, (count, count)) + 50 * np.eye(count, dtype=np.int64)
    names = [f"a class with a rather long name {i}" for i in range(count)]
    write_class_report(matrix, names, tmp_path)
    with Image.open(tmp_path / "confusion.png") as picture:
        picture.load()
        assert 400 <= picture.width <= 2000 and 400 <= picture.height <= 2000


@pytest.mark.slow
def test_one_confusion_among_a_thousand_classes_is_visible(tmp_path):
    matrix = 50 * np.eye(1000, dtype=np.int64)
    write_class_report(matrix, [str(i) for i in range(1000)], tmp_path)
    without = np.asarray(Image.open(tmp_path / "confusion.png").convert("L")).astype(int)
    matrix[700, 200] = 1
    write_class_report(matrix, [str(i) for i in range(1000)], tmp_path)
    with_one = np.asarray(Image.open(tmp_path / "confusion.png").convert("L")).astype(int)
    height = without.shape[0]
    darker = (without - with_one)[height // 2 :] > 20  # below the title, which differs as well
    assert 4 <= darker.sum() <= 200


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        write_class_report(MATRIX, NAMES, tmp_path / "file")


def test_names_that_the_font_lacks_are_numbers_in_plots(tmp_path):
    names = ["cat", "\u7ecf\u6d4e", "caf\u00e9", "x" * 40]
    assert plotted_names(names)[:3] == ["cat", "class 1", "caf\u00e9"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of characters that the font lacks
        save_figure(draw_confusions(np.eye(2, dtype=np.int64), names[1:3]), tmp_path / "a.png")


@pytest.mark.parametrize("count", [2, 10, 40, 100])
def test_what_mixup_has_learned_is_drawn_for_any_number_of_classes(tmp_path, count):
    mean = np.random.default_rng(0).uniform(0.5, 1, (count, count))
    names = [f"class {i} $x_1 猫" for i in range(count)]
    save_figure(draw_mean_lambda((mean + mean.T) / 2, names), tmp_path / "policy.png")
    with Image.open(tmp_path / "policy.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300


def test_one_number_for_all_pairs_is_written():
    drawn = draw_mean_lambda(np.full((3, 3), 0.75), ["a", "b", "c"])
    texts = [text.get_text() for text in drawn.texts]
    assert "0.750" in texts and any(text.endswith("for all pairs of classes") for text in texts)
