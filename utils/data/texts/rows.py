"""Turns rows of a file into texts, with or without classes; bad rows are refused or left out."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.data.texts.clean import clean_text
from utils.data.texts.columns import choose_columns
from utils.data.texts.files import broken_text, file_kind, read_table, read_text_file
from utils.errors import UserError


@dataclass
class Samples:
    """The texts of a file, each with its class (as it is written there) and its line.

    `problems` are the bad rows, which are left out: (line, what is wrong with it). `note` says
    which columns were guessed, `header` whether the first row names them. `different` counts the
    different texts before cleaning.
    """

    path: Path
    note: str | None = None
    header: bool = False
    different: int = 0
    lines: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def refuse(self) -> None:
        """UserError for the first bad row."""
        if self.problems:
            line, problem = min(self.problems)
            raise UserError(f"{self.path}: line {line} {problem}: correct it, or use --on_bad skip")


def read_samples(
    path: Path,
    *,
    text_columns: Sequence[str] = (),
    label_column: str | None = None,
    on_bad: str = "error",
    clean: bool = True,
    classes: Collection[str] = (),
    line_end: str | None = None,
) -> Samples:
    """Texts and classes of a CSV, TSV or JSON Lines file.

    `classes` are those of the training data; a row of another class is bad. Empty: any will do.
    `line_end` is how the file writes the end of a line within a text, which cleaning then takes for
    a space.

    Raises:
        UserError: the file cannot be used, no row of it can, or, unless `on_bad` is "skip", one
            of its rows cannot.
    """
    table = read_table(path)
    if not any(row.problem is None for row in table.rows):
        line, problem = table.rows[0].line, table.rows[0].problem
        raise UserError(f"{path}: no row can be used; line {line} {problem}: correct the file")
    columns = choose_columns(table, text_columns, label_column, classes=classes)
    samples = Samples(path, columns.note, columns.header or table.names is not None)
    known, originals = set(classes), set()
    by_number = {whole_number(name): name for name in classes}
    if None in by_number:
        by_number = {}
    header = table.rows[0].cells if columns.header else None
    for row in table.rows[columns.header :]:
        problem, text, label = row.problem, "", ""
        if row.cells == header:  # as in files that were joined
            problem = "is the header row once more"
        if problem is None:
            chosen = [row.cells[column] for column in columns.texts]
            text, original = _join(chosen, clean, line_end), _join(chosen, False)
            label = " ".join((row.cells[columns.label] or "").split())
            if label not in known:
                label = by_number.get(whole_number(label), label)
            if not label:
                problem = "has no class"
            elif not text:
                problem = "has no text"
                if original:
                    problem += " (after cleaning; --no_clean_text keeps links and markup)"
            elif known and label not in known:
                problem = f"has the class {label[:40]!r}, which the training file does not have"
        if problem is None:
            originals.add(hash(original))
            samples.lines.append(row.line)
            samples.texts.append(text)
            samples.labels.append(label)
        else:
            samples.problems.append((row.line, problem))
    samples.different = len(originals)
    if on_bad == "error":
        samples.refuse()
    if not samples.texts:
        first = " and ".join(f"line {line} {problem}" for line, problem in samples.problems[:1])
        raise UserError(f"{path} has no row that can be used{first and ': '}{first}")
    return samples


def whole_number(name: str) -> str | None:
    """ "1" for "1" and, as pandas writes it beside missing values, "1.0"; None for other names."""
    found = re.fullmatch(r"([0-9]{1,18})(\.0+)?", name)
    return None if found is None else found[1]


def read_texts(
    path: str | Path,
    text_columns: Sequence[str] = (),
    label_column: str | None = None,
    on_bad: str = "error",
    clean: bool = True,
    classes: Collection[str] = (),
    line_end: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[int, str]]:
    """Texts to be classified, each with the number of its line, from 1.

    Read from a CSV, TSV or JSON Lines file, in which a column with classes is ignored, or from a
    .txt file with one text a line. Blank lines are ignored. `label_column` is the name that the
    column with classes had in the training file, None if it was guessed there. `classes` helps to
    tell a column with classes from one with text. `line_end`: see `read_samples`. `say` is given a
    line on columns that were guessed, and on rows that are left out.

    Raises:
        UserError: the file cannot be used, it has no text, or, unless `on_bad` is "skip", one of
            its rows has none.
    """
    path = Path(path)
    rows: list[tuple[int, str, str | None]] = []  # line, text, problem
    if file_kind(path) == "txt":
        for line, text in enumerate(io.StringIO(read_text_file(path), newline=""), 1):
            if not text.isspace():
                rows.append((line, _join([text], clean, line_end), broken_text(text)))
    else:
        table = read_table(path)
        columns = choose_columns(
            table, text_columns, label_column, classes=classes, needs_label=False
        )
        if columns.note:
            say(columns.note)
        for row in table.rows[columns.header :]:
            cells = [] if row.problem else [row.cells[column] for column in columns.texts]
            rows.append((row.line, _join(cells, clean, line_end), row.problem))
    texts, problems = [], []
    for line, text, problem in rows:
        problem = problem or (None if text else "has no text" + " (after cleaning)" * clean)
        if problem is None:
            texts.append((line, text))
        elif on_bad == "error":
            raise UserError(f"{path}: line {line} {problem}: correct it, or use --on_bad skip")
        else:
            problems.append((line, problem))
    if not texts:
        raise UserError(f"{path} has no text to classify")
    if problems:
        say(left_out(path, problems))
    return texts


def left_out(path: Path, problems: Sequence[tuple[int, str]]) -> str:
    """A line on the bad rows of a file, (line, what is wrong with it) each."""
    (line, problem), count = problems[0], len(problems)
    rows = "1 bad row left out," if count == 1 else f"{count:,} bad rows left out, the first"
    return f"{path.name}: {rows} in line {line}, which {problem}"


def column_names(text: str | None) -> list[str] | None:
    """The names in the value of --text_columns: "title, body" -> ["title", "body"]."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _join(cells: list[str | None], clean: bool, line_end: str | None = None) -> str:
    text = " ".join(cell for cell in cells if cell)
    if clean and line_end is not None:
        text = text.replace(line_end, "\n")
    return clean_text(text) if clean else text.strip()
