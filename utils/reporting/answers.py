"""Tables of samples and of what a model answered to them: evaluated.csv, labels_to_check.csv,
predictions.csv and splits.csv."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from ..files import written_aside
from ..measures.findings import Doubt
from ..measures.outcomes import LARGEST, MOST_CLASSES, Outcomes
from .csv_fields import quoted, safe_text


@dataclass(frozen=True)
class SampleNames:
    """What tells a user which samples a split has.

    Attributes:
        columns: of the table, such as "file".
        cells: returns an iterator over the samples, in their order: texts for these columns, none
            of them a formula.
        texts: likewise what the model reads of each; None: they are no texts.
        picture: returns the picture of a sample, (height, width, channels) uint8.
    """

    columns: Sequence[str]
    cells: Callable[[], Iterator[Sequence[str]]]
    texts: Callable[[], Iterator[str]] | None = None
    picture: Callable[[int], np.ndarray] | None = None


@contextlib.contextmanager
def table_file(path: str | Path) -> Iterator[TextIO]:
    """The file `path`, which is replaced only if the block ends without an error. UTF-8 with a
    byte-order mark, since Excel takes it for Latin-1 without one."""
    with (
        written_aside(path) as aside,
        open(aside, "w", encoding="utf-8-sig", errors="backslashreplace", newline="") as file,
    ):
        yield file


class AnswerTable:
    """Writes a table of answers: the predicted class, its probability, and p_<class> of each class;
    of more than MOST_CLASSES instead the next likeliest with theirs.

    Args:
        columns: before these, and `further` ones behind them.
    """

    def __init__(
        self,
        file: TextIO,
        classes: Sequence[str],
        columns: Sequence[str],
        further: Sequence[str] = (),
    ):
        self._file = file
        self._classes = [quoted(safe_text(name)) for name in classes]
        self._keeps_all = len(classes) <= MOST_CLASSES
        answers = ["predicted", "probability"]
        if self._keeps_all:
            answers += [f"p_{name}" for name in classes]
        else:
            numbers = range(2, LARGEST + 1)
            answers += [f"{what}_{n}" for n in numbers for what in ("predicted", "probability")]
        self._write(map(quoted, [*columns, *answers, *further]))
        self._blank = [""] * (len(answers) + len(further))

    def _write(self, fields: Iterable[str]) -> None:
        self._file.write(",".join(fields) + "\n")

    def without_answer(self, cells: Iterable[str]) -> None:
        self._write([*map(quoted, cells), *self._blank])

    def answer(
        self, cells: Iterable[str], order: np.ndarray, p: np.ndarray, further: Iterable[str] = ()
    ) -> None:
        """A row.

        Args:
            cells: of the first columns, and `further` of the last.
            order, p: (k,), a sample's row of `answers_of`.
        """
        likeliest, names = int(p.argmax()), self._classes
        answers = [names[order[likeliest]], f"{p[likeliest]:.6f}"]
        if self._keeps_all:
            answers.append(",".join(["%.6f"] * len(p)) % tuple(p.tolist()))
        else:
            for place in range(1, len(p)):
                answers += names[order[place]], f"{p[place]:.6f}"
        self._write([*map(quoted, cells), *answers, *further])


def write_evaluated(
    path: Path, outcomes: Outcomes, classes: Sequence[str], split: str, names: SampleNames
) -> None:
    """Writes a row for each sample of an evaluated split. Raises UserError or OSError if a file
    cannot be written or read."""
    texts = itertools.repeat([]) if names.texts is None else _fields(names.texts())
    columns = [*names.columns, *(["text"] if names.texts else []), "split", "true"]
    true = [safe_text(name) for name in classes]
    samples = zip(names.cells(), texts)  # noqa: B905  # `texts` may be endless
    with table_file(path) as file:
        table = AnswerTable(file, classes, columns, ["loss"])
        for targets, losses, order, p in outcomes.chunks():
            for row, target in enumerate(targets.tolist()):
                cells, text = next(samples)
                cells = [*cells, *text, split, true[target]]
                table.answer(cells, order[row], p[row], [f"{losses[row]:.6f}"])


def write_labels_to_check(
    path: Path, evaluated: Path, doubts: Sequence[Doubt], classes: Sequence[str]
) -> None:
    """Writes a row for each sample with a doubtful label, with a column `label` for a person to
    correct. `evaluated`, of `write_evaluated`, names the samples. Raises OSError."""
    wanted, named = {doubt.sample for doubt in doubts}, [safe_text(name) for name in classes]
    with open(evaluated, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        columns = next(rows)
        end = columns.index("predicted")  # after `true`
        cells = {sample: row[:end] for sample, row in enumerate(rows) if sample in wanted}
    with table_file(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*columns[:end], "suggested", "quality", "label"])
        for one in doubts:
            row = *cells[one.sample], named[one.predicted], f"{one.quality:.6f}", named[one.true]
            table.writerow(row)


def _fields(texts: Iterator[str]) -> Iterator[list[str]]:
    return ([safe_text(text)] for text in texts)


def write_splits(
    path: Path, splits: Mapping[str, tuple[SampleNames, np.ndarray]], classes: Sequence[str]
) -> None:
    """Writes a row for each sample of these splits, with its class and its split. Raises
    UserError.

    Args:
        splits: by name: what names the samples, and their labels, (samples,) int64.
    """
    named = [quoted(safe_text(name)) for name in classes]
    first, _ = next(iter(splits.values()))
    with table_file(path) as file:
        file.write(",".join(map(quoted, [*first.columns, "class", "split"])) + "\n")
        for split, (names, labels) in splits.items():
            for cells, label in zip(names.cells(), labels.tolist(), strict=True):
                file.write(",".join([*map(quoted, cells), named[label], split]) + "\n")
