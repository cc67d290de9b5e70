"""The report on classes: scores of each class, the confusion matrix, and a plot of it."""

import csv
import io
import os
import unicodedata
from pathlib import Path

import numpy as np

from utils.files import replace_file
from utils.plural import counted

# Most classes for which plots have a number in every cell, and the name of every class.
CLASSES_WITH_NUMBERS = 20
CLASSES_WITH_NAMES = 60
# Characters with which a formula begins in a spreadsheet (OWASP, CSV injection).
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_class_report(matrix: np.ndarray, classes: list[str], folder: Path) -> None:
    """Writes per_class.csv, confusion.csv and confusion.png, each atomically.

    Args:
        matrix: (classes, classes) int64, numbers of samples; a row for each true class, a column
            for each predicted class.
        classes: their names, of any characters and length.
        folder: where the files go.

    Raises:
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    replace_file(folder / "per_class.csv", _table(_per_class(matrix, classes)))
    header = ["true class \\ predicted", *map(_cell, classes)]
    rows = ([_cell(name), *row] for name, row in zip(classes, matrix.tolist(), strict=True))
    replace_file(folder / "confusion.csv", _table([header, *rows]))
    replace_file(folder / "confusion.png", draw_confusions(matrix, classes))


def class_scores(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Per class: samples, and recall (the class's accuracy), precision and F1 from 0 to 1.

    NaN where there is nothing to measure: recall without samples, precision without predictions, F1
    without both. F1 is 2 true positives / (samples + predictions).
    """
    hits = matrix.diagonal().astype(float)
    samples, predicted = matrix.sum(1), matrix.sum(0)
    with np.errstate(invalid="ignore"):
        return {
            "samples": samples,
            "recall": hits / samples,
            "precision": hits / predicted,
            "f1": 2 * hits / (samples + predicted),
        }


def summary_lines(matrix: np.ndarray, classes: list[str], count: int = 5) -> list[str]:
    """For the console: the worst classes and the most frequent confusions, `count` of each."""
    recall = class_scores(matrix)["recall"]
    measured = np.flatnonzero(~np.isnan(recall))
    if not measured.size:
        return []
    # The worst first; among equally bad ones, the more frequent first.
    order = np.lexsort((-matrix.sum(1)[measured], recall[measured]))
    worst = [f"{short_name(classes[i])} {100 * recall[i]:.1f} %" for i in measured[order][:count]]
    lines = [f"worst classes of {len(measured)}: {', '.join(worst)}"]
    wrong = matrix - np.diag(matrix.diagonal())
    pairs = np.argsort(-wrong, axis=None, kind="stable")[:count]
    confusions = [
        f"{short_name(classes[i])} taken for {short_name(classes[j])} ({counted(number, 'time')})"
        for i, j in zip(*np.unravel_index(pairs, wrong.shape), strict=True)
        if (number := int(wrong[i, j]))
    ]
    if confusions:
        lines.append(f"most frequent confusions: {', '.join(confusions)}")
    if len(measured) < len(classes):
        lines.append(f"without samples: {len(classes) - len(measured)} of {len(classes)} classes")
    return lines


# ---- tables -----------------------------------------------------------------------------------


def _per_class(matrix: np.ndarray, classes: list[str]) -> list[list]:
    scores = class_scores(matrix)
    wrong = matrix - np.diag(matrix.diagonal())
    names = ["class", "samples", "recall", "precision", "f1", "most often taken for", "times"]
    rows: list[list] = [names]
    for i, name in enumerate(classes):
        other = int(wrong[i].argmax())
        times = int(wrong[i, other])
        rows.append([
            _cell(name),
            int(scores["samples"][i]),
            *("" if np.isnan(scores[key][i]) else f"{scores[key][i]:.4f}"
              for key in ("recall", "precision", "f1")),
            *((_cell(classes[other]), times) if times else ("", "")),
        ])  # fmt: skip
    return rows


def _table(rows) -> bytes:
    """CSV (RFC 4180), with a byte-order mark, since Excel takes UTF-8 without one for Latin-1."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8-sig", errors="backslashreplace")


def _cell(name: str) -> str:
    """The name, after an apostrophe if a spreadsheet would take it for a formula."""
    return f"'{name}" if name.startswith(FORMULA) else name


# ---- the plot ---------------------------------------------------------------------------------


def draw_confusions(matrix: np.ndarray, classes: list[str]) -> bytes:
    """A PNG. Colours show percentages of each row, so that rare classes are equally visible."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    count = len(classes)
    samples = matrix.sum(1, keepdims=True)
    nan = np.full(matrix.shape, np.nan)
    percent = np.divide(100 * matrix, samples, out=nan, where=samples > 0)
    with_numbers = count <= CLASSES_WITH_NUMBERS
    inches = min(max(4.5, 0.55 * count), 10.0)
    figure = Figure(figsize=(inches + 2, inches + 1), layout="compressed")
    axis = figure.subplots()
    axis.set_facecolor("lightgray")  # a class without samples
    # Single confusions in a large matrix are faint: the cube root gives 1 % a fifth of the colour.
    image = axis.imshow(
        _largest_of_blocks(percent, 250),
        norm=PowerNorm(1 if with_numbers else 1 / 3, vmin=0, vmax=100),
        cmap="Blues",
        interpolation="nearest",
        extent=(-0.5, count - 0.5, count - 0.5, -0.5),
    )
    ticks = None if with_numbers else [0, 1, 5, 20, 50, 100]
    bar = figure.colorbar(image, ax=axis, shrink=0.8, fraction=0.04, ticks=ticks)
    bar.set_label("% of the true class")
    if count <= CLASSES_WITH_NAMES:
        names = plotted_names(classes)
        style = {"fontsize": 9 if with_numbers else 6, "parse_math": False}
        upright = with_numbers and max(map(len, names)) <= 4
        axis.set_xticks(range(count), names, rotation=0 if upright else 90, **style)
        axis.set_yticks(range(count), names, **style)
    if with_numbers:
        _write_numbers(axis, matrix, percent)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    correct, total = int(matrix.trace()), int(matrix.sum())
    if total:
        axis.set_title(f"{100 * correct / total:.2f} % of {total:,} correct", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _write_numbers(axis, matrix: np.ndarray, percent: np.ndarray) -> None:
    """Number of samples in each cell that has some, and below it the percentage, if that fits."""
    few = len(matrix) <= 10
    for (i, j), value in np.ndenumerate(matrix):
        if value:
            colour = "white" if percent[i, j] > 55 else "black"
            text = _number(int(value)) + (f"\n{percent[i, j]:.0f} %" if few else "")
            size = 12 if len(matrix) <= 4 else 8
            axis.text(j, i, text, ha="center", va="center", color=colour, fontsize=size)


def _largest_of_blocks(matrix: np.ndarray, limit: int) -> np.ndarray:
    """The matrix reduced to at most limit x limit cells, each the largest entry of its block."""
    block = -(-len(matrix) // limit)
    if block == 1:
        return matrix
    starts = np.arange(0, len(matrix), block)
    return np.fmax.reduceat(np.fmax.reduceat(matrix, starts, axis=0), starts, axis=1)


def _number(value: int) -> str:
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
