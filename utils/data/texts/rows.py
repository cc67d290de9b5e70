"""Turns rows of a file into texts, with or without classes; bad rows are refused or left out."""

import io
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import UserError
from .clean import clean_text
from .columns import choose_columns
from .files import Row, broken_text, file_kind, read_table, read_text_file
from .sources import TextRequest

_SHOWN = 5  # reasons and classes in a message


@dataclass
class Samples:
    """The texts of a file, each with its class (as it is written there) and its line.

    `problems` are the bad rows, which are left out: (line, what is wrong with it, its class, "" if
    it cannot be read). `note` says which columns are taken. `different` counts the different texts
    before cleaning. `groups` has one for each text if there is a column of them, "" where it is
    empty.
    """

    path: Path
    note: str
    different: int = 0
    lines: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def refuse(self, most: float | None) -> None:
        """UserError if more than this fraction of the rows are bad; None: if any is."""
        bad, total = len(self.problems), len(self.problems) + len(self.texts)
        if most is None and bad:
            line, problem, _ = min(self.problems)
            told = f"line {line} {problem}{self.lost() if bad > 1 else ''}"
            raise UserError(f"{self.path}: {told}: correct it, or use --on_bad skip")
        if most is not None and bad > most * total:
            reasons = Counter(problem for _, problem, _ in self.problems).most_common(_SHOWN)
            told = "; ".join(f"{count:,}: {problem}" for problem, count in reasons)
            raise UserError(
                f"{self.path}: {bad:,} of {total:,} rows cannot be used ({told}){self.lost()}: "
                f"correct them, or allow more than {100 * most:g} % with --max_bad"
            )

    def lost(self, whole: bool = False) -> str:
        """How many rows of each class are bad, for a message; `whole`: of those that have no others
        alone."""
        kept, labels = Counter(self.labels), (label for *_, label in self.problems if label)
        lost = Counter(label for label in labels if not (whole and kept[label]))
        told = f" and {len(lost) - _SHOWN} classes more" * (len(lost) > _SHOWN)
        for label, count in reversed(lost.most_common(_SHOWN)):
            of = f"of the {count + kept[label]:,}" if kept[label] else "(all)"
            told = f"; bad are {count:,} {of} of class {label[:40]!r}{told}"
        return told

    def left_out(self, how: str = "left out") -> str:
        """A line on the bad rows, of which there are some."""
        (line, problem, _), count = self.problems[0], len(self.problems)
        rows = f"1 bad row {how}," if count == 1 else f"{count:,} bad rows {how}, the first"
        return f"{self.path.name}: {rows} in line {line}, which {problem}"


def read_samples(
    path: Path,
    request: TextRequest,
    *,
    classes: Collection[str] = (),
    line_end: str | None = None,
) -> Samples:
    """Texts and classes of a CSV, TSV or JSON Lines file.

    `classes` are those of the training data; a row of another class is bad. Empty: any will do.
    `line_end` is how the file writes the end of a line within a text, which cleaning then takes for
    a space.

    Raises:
        UserError: the file cannot be used, no row of it can, or one of its rows cannot; where
            `on_bad` is "skip", more than the fraction `max_bad` of them.
    """
    table = read_table(path, encoding=request.encoding)
    if not any(row.problem is None for row in table.rows):
        line, problem = table.rows[0].line, table.rows[0].problem
        raise UserError(f"{path}: no row can be used; line {line} {problem}: correct the file")
    asked = request.text_columns, request.label_column
    by, header = request.group_column, request.header
    columns = choose_columns(table, *asked, classes=classes, header=header, group_column=by)
    samples = Samples(path, columns.note)
    known, originals = set(classes), set()
    by_number = {whole_number(name): name for name in classes}
    if None in by_number:
        by_number = {}
    first = table.rows[0].cells if columns.header else None
    for row in table.rows[columns.header :]:
        problem, text, label, group = row.problem, "", "", None
        if row.cells == first:  # as in files that were joined
            problem = "is the header row once more"
        if problem is None:
            chosen = [row.cells[column] for column in columns.texts]
            text, original = _join(chosen, request.clean, line_end), _join(chosen, False)
            label = " ".join((row.cells[columns.label] or "").split())
            if columns.group is not None:
                group = (row.cells[columns.group] or "").strip()
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
            elif group == "" and not known:
                problem = "has no group (--group_column)"
        if problem is None:
            originals.add(hash(original))
            samples.lines.append(row.line)
            samples.texts.append(text)
            samples.labels.append(label)
            samples.groups += [] if group is None else [group]
        else:
            samples.problems.append((row.line, problem, label))
    samples.different = len(originals)
    samples.refuse(None if request.on_bad == "error" else request.max_bad)
    if not samples.texts:
        why = "".join(f": line {line} {problem}" for line, problem, _ in samples.problems[:1])
        raise UserError(f"{path} has no row that can be used{why}")
    return samples


def whole_number(name: str) -> str | None:
    """ "1" for "1" and, as pandas writes it beside missing values, "1.0"; None for other names."""
    found = re.fullmatch(r"([0-9]{1,18})(\.0+)?", name)
    return None if found is None else found[1]


def read_texts(
    path: Path,
    request: TextRequest,
    *,
    classes: Collection[str] = (),
    line_end: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[int, str | None]]:
    """The rows of texts to be classified: the number of the line, from 1, and the text; None if the
    row is bad.

    Read from a CSV, TSV or JSON Lines file, in which a column with classes is ignored, or from a
    .txt file with one text a line. Blank lines are ignored. `request.label_column` is the name that
    the column with classes had in the training file, None if it was guessed there. `classes` helps
    to tell a column with classes from one with text. `say` is given a line on the columns that are
    taken, and on bad rows.

    Raises:
        UserError: the file cannot be used, it has no text, or, unless `on_bad` is "skip", one of
            its rows has none.
    """
    if file_kind(path) == "txt":
        content, remark = read_text_file(path, request.encoding)
        note = f"{path.name}{remark.removeprefix(',')}" if remark else ""
        lines = enumerate(io.StringIO(content, newline=""), 1)
        rows = [Row(line, [text], broken_text(text)) for line, text in lines if not text.isspace()]
        columns = [0]
    else:
        table = read_table(path, encoding=request.encoding)
        asked = request.text_columns, request.label_column
        found = choose_columns(
            table, *asked, classes=classes, needs_label=False, header=request.header
        )
        note, rows, columns = found.note, table.rows[found.header :], found.texts
    if note:
        say(note)
    samples, texts = Samples(path, note), []
    for row in rows:
        cells = [] if row.problem else [row.cells[column] for column in columns]
        text = _join(cells, request.clean, line_end)
        texts.append((row.line, text or None))
        if not text:
            problem = row.problem or "has no text" + " (after cleaning)" * request.clean
            samples.problems.append((row.line, problem, ""))
    if request.on_bad == "error":
        samples.refuse(None)
    if len(samples.problems) == len(texts):
        raise UserError(f"{path} has no text to classify")
    if samples.problems:
        say(samples.left_out("without a class"))
    return texts


def column_names(text: str | None) -> list[str] | None:
    """The names in the value of --text_columns: "title, body" -> ["title", "body"]."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _join(cells: list[str | None], clean: bool, line_end: str | None = None) -> str:
    text = " ".join(cell for cell in cells if cell)
    if clean and line_end is not None:
        text = text.replace(line_end, "\n")
    return clean_text(text) if clean else text.strip()
