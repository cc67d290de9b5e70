"""The report on classes: scores of each, the confusion matrix, and plots of pairs of classes."""

import csv
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..machine.packages import is_installed
from ..measures.compute import class_scores, margins
from ..plural import counted
from .answers import table_file
from .csv_fields import safe_text
from .plots import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Most classes for which plots have a number in every cell, and the name of every class.
CLASSES_WITH_NUMBERS = 20
CLASSES_WITH_NAMES = 60


def write_class_report(matrix: np.ndarray, classes: list[str], folder: Path) -> None:
    """Writes per_class.csv, confusion.csv and, with matplotlib, confusion.png, each atomically.

    Args:
        matrix: (classes, classes) int64, numbers of samples; a row for each true class, a column
            for each predicted class.
        classes: their names, of any characters and length.
        folder: where the files go.

    Raises:
        UserError: a file cannot be written; or OSError.
    """
    names = [*map(safe_text, classes)]
    rows = ([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
    confused = [["true class \\ predicted", *names], *rows]
    tables = {"per_class.csv": class_rows(matrix, names), "confusion.csv": confused}
    for name, lines in tables.items():
        with table_file(folder / name) as file:
            csv.writer(file).writerows(lines)
    if is_installed("matplotlib"):
        save_figure(draw_confusions(matrix, classes), folder / "confusion.png")


def summary_lines(matrix: np.ndarray, classes: list[str], count: int = 5) -> list[str]:
    """For the console: the worst classes and the most frequent confusions, `count` of each. None
    of two classes, or where nothing is confused."""
    pairs = confusions(matrix, count)
    if len(classes) <= 2 or not pairs:
        return []
    recall = class_scores(margins(matrix))["recall"]
    measured = np.flatnonzero(~np.isnan(recall))
    # The worst first; among equally bad ones, the more frequent first.
    order = np.lexsort((-matrix.sum(1)[measured], recall[measured]))
    worst = [f"{short_name(classes[i])} {100 * recall[i]:.1f} %" for i in measured[order][:count]]
    told = ", ".join(
        f"{short_name(classes[i])} taken for {short_name(classes[j])} ({counted(number, 'time')})"
        for i, j, number in pairs
    )
    lines = [
        f"worst classes of {len(measured)}: {', '.join(worst)}",
        f"most frequent confusions: {told}",
    ]
    if len(measured) < len(classes):
        lines.append(f"without samples: {len(classes) - len(measured)} of {len(classes)} classes")
    return lines


def confusions(matrix: np.ndarray, count: int) -> list[tuple[int, int, int]]:
    """(true, predicted, times) of the most frequent confusions, `count` at most."""
    wrong = matrix - np.diag(matrix.diagonal())
    cells = np.argsort(-wrong, axis=None, kind="stable")[:count]
    pairs = zip(*np.unravel_index(cells, wrong.shape), strict=True)
    return [(int(i), int(j), int(wrong[i, j])) for i, j in pairs if wrong[i, j]]


# ---- tables -----------------------------------------------------------------------------------


def class_rows(matrix: np.ndarray, classes: Sequence[str]) -> list[list]:
    """The head of a table of classes, and a row for each."""
    scores = class_scores(margins(matrix))
    wrong = matrix - np.diag(matrix.diagonal())
    names = ["class", "samples", "recall", "precision", "f1", "most often taken for", "times"]
    rows: list[list] = [names]
    for i, name in enumerate(classes):
        other = int(wrong[i].argmax())
        times = int(wrong[i, other])
        rows.append([
            name,
            int(matrix[i].sum()),
            *("" if np.isnan(scores[key][i]) else f"{scores[key][i]:.4f}"
              for key in ("recall", "precision", "f1")),
            *((classes[other], times) if times else ("", "")),
        ])  # fmt: skip
    return rows


# ---- plots ------------------------------------------------------------------------------------


def draw_confusions(matrix: np.ndarray, classes: list[str]) -> "Figure":
    """The confusion matrix. Colours show percentages of each row, so that rare classes are equally
    visible; with few classes each cell has its number of samples, and with very few the
    percentage, too."""
    from matplotlib.colors import PowerNorm

    count = len(classes)
    samples = matrix.sum(1, keepdims=True)
    nan = np.full(matrix.shape, np.nan)  # a class without samples
    percent = np.divide(100 * matrix, samples, out=nan, where=samples > 0)

    def written(i: int, j: int) -> str:
        share = f"\n{percent[i, j]:.0f} %" if count <= 10 else ""
        return _short_number(int(matrix[i, j])) + share if matrix[i, j] else ""

    # Single confusions in a large matrix are faint: the cube root gives 1 % a fifth of the colour.
    few = count <= CLASSES_WITH_NUMBERS
    figure, axis = _heat_map(
        _largest_of_blocks(percent, 250),
        classes,
        "% of the true class",
        written,
        percent > 55,
        ticks=None if few else [0, 1, 5, 20, 50, 100],
        norm=PowerNorm(1 if few else 1 / 3, vmin=0, vmax=100),
        cmap="Blues",
    )
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    correct, total = int(matrix.trace()), int(matrix.sum())
    if total:
        axis.set_title(f"{100 * correct / total:.2f} % of {total:,} correct", fontsize=10)
    return figure


def draw_mean_lambda(mean: np.ndarray, classes: list[str]) -> "Figure":
    """How strongly meta-mixup mixes each pair of classes: the mean of the larger of lambda and
    1 - lambda; one number if that is the same for all pairs.

    Args:
        mean: (classes, classes), 1/2 (half and half) to 1 (not mixed).
    """
    from matplotlib.figure import Figure

    title = "what mixup has learned: 0.5 is half and half, 1 is not mixed"
    what = "mean of the larger of lambda and 1 - lambda"
    low, high = float(mean.min()), float(mean.max())
    if high - low < 1e-6:
        figure = Figure(figsize=(5.5, 2))
        figure.suptitle(title, fontsize=9)
        figure.text(0.5, 0.45, f"{mean.mean():.3f}", ha="center", va="center", fontsize=24)
        figure.text(0.5, 0.15, f"{what}, for all pairs of classes", ha="center", fontsize=9)
        return figure
    room = max(0.02, (high - low) / 20)  # so that nearly equal values have nearly equal colours
    figure, axis = _heat_map(
        mean,
        classes,
        what,
        lambda i, j: f"{mean[i, j]:.2f}",
        mean < (low + high) / 2,
        vmin=low - room,
        vmax=high + room,
        cmap="viridis",
    )
    axis.set_title(title, fontsize=9)
    return figure


def _heat_map(cells: np.ndarray, classes: list[str], label: str, written: Callable[[int, int], str],
              dark: np.ndarray, ticks: list | None = None, **colours):  # fmt: skip
    """Draws a coloured cell for each pair of classes; returns (figure, axis).

    Args:
        cells: (rows, columns), as many as there are classes or fewer; gray where NaN.
        label: of the scale of colours; `ticks`: on it.
        written: (row, column) -> text, for few classes.
        dark: (classes, classes), which cells are too dark for black text.
        colours: for `imshow`.
    """
    from matplotlib.figure import Figure

    count = len(classes)
    few = count <= CLASSES_WITH_NUMBERS
    inches = min(max(4.5, 0.55 * count), 10.0)
    figure = Figure(figsize=(inches + 2, inches + 1), layout="compressed")
    axis = figure.subplots()
    axis.set_facecolor("lightgray")
    extent = (-0.5, count - 0.5, count - 0.5, -0.5)
    image = axis.imshow(cells, interpolation="nearest", extent=extent, **colours)
    bar = figure.colorbar(image, ax=axis, shrink=0.8, fraction=0.04, ticks=ticks)
    bar.set_label(label)
    if count <= CLASSES_WITH_NAMES:
        names = plotted_names(classes)
        style = {"fontsize": 9 if few else 6, "parse_math": False}
        upright = few and max(map(len, names)) <= 4
        axis.set_xticks(range(count), names, rotation=0 if upright else 90, **style)
        axis.set_yticks(range(count), names, **style)
    if few:
        size = 12 if count <= 4 else 8
        for i, j in np.ndindex(count, count):
            colour = "white" if dark[i, j] else "black"
            axis.text(j, i, written(i, j), ha="center", va="center", color=colour, fontsize=size)
    return figure, axis


def _largest_of_blocks(matrix: np.ndarray, limit: int) -> np.ndarray:
    """The matrix reduced to at most limit x limit cells, each the largest entry of its block."""
    block = -(-len(matrix) // limit)
    if block == 1:
        return matrix
    starts = np.arange(0, len(matrix), block)
    return np.fmax.reduceat(np.fmax.reduceat(matrix, starts, axis=0), starts, axis=1)


def _short_number(value: int) -> str:
    """In at most five characters: 12345, 123k, 12M."""
    if value < 100_000:
        return str(value)
    return f"{value / 1e3:.0f}k" if value < 1_000_000 else f"{value / 1e6:.0f}M"


def short_name(name: str, length: int = 24) -> str:
    """The name on one line of printable characters, shortened in the middle, since names differ at
    their ends."""
    printable = "".join(
        letter if unicodedata.category(letter)[0] != "C" else "\N{REPLACEMENT CHARACTER}"
        for letter in " ".join(name.split())
    )
    if len(printable) <= length:
        return printable
    keep = length - 1
    return f"{printable[: keep - keep // 2]}…{printable[len(printable) - keep // 2 :]}"


def plotted_names(classes: list[str]) -> list[str]:
    """Short names; "class 3", counted from 0, for one with characters that the font of plots
    lacks, such as Chinese ones."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))

    def can_be_drawn(name: str) -> bool:
        return all(font.get_char_index(ord(letter)) for letter in name)

    names = map(short_name, classes)
    return [name if can_be_drawn(name) else f"class {i}" for i, name in enumerate(names)]
