"""Finds which columns of a table hold the text and the class, and whether it begins with a header.

What the user does not specify is guessed, for each file by itself, first from the columns' names
and then from their content; `Columns.note` states the guess in one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from utils.data.texts.files import Row, Table
from utils.errors import UserError
from utils.plural import counted

# The first of LABEL_NAMES that a header has is the class; all of TEXT_NAMES in it are text.
LABEL_NAMES = (
    "label", "labels", "class", "class index", "category", "target", "sentiment", "topic",
    "polarity", "intent", "stars", "rating", "class name", "label text", "gold label", "y",
)  # fmt: skip
TEXT_NAMES = (
    "text", "texts", "title", "description", "sentence", "content", "contents", "body", "headline",
    "headlines", "review", "review text", "review body", "comment", "message", "tweet", "question",
    "document", "article", "abstract", "news", "subject", "short description", "utterance",
    "sentence1", "sentence2", "premise", "hypothesis",
)  # fmt: skip
_SAMPLE_ROWS = 2000  # that guesses look at
_LONGEST_NAME = 40  # characters of a column's name


@dataclass(frozen=True)
class Columns:
    """Columns are counted from 0. `label` is None if the table has no class."""

    texts: list[int]
    label: int | None
    header: bool
    note: str | None


def choose_columns(
    table: Table,
    text_columns: Sequence[str],
    label_column: str | None,
    *,
    classes: Collection[str] = (),
    needs_label: bool = True,
) -> Columns:
    """The columns named by the user, and guesses for those that are not.

    Args:
        text_columns: names of columns, or their numbers from 1; empty: guessed.
        label_column: likewise; None: guessed. If no class is needed, it is that of the training
            file, by name.
        classes: names of the classes in the training data, if they are known.
        needs_label: whether a table without a class is an error.

    Raises:
        UserError: a column is missing or both text and class, or the table has too few.
    """
    header = _has_header(table, text_columns, label_column, classes)
    names = table.names
    if header:
        names = [cell.strip() for cell in table.rows[0].cells]
    sample = [row for row in table.rows[header : _SAMPLE_ROWS + header] if row.problem is None]
    plain = [_plain(name) for name in names] if names is not None else None

    flag = "--text_columns" if needs_label else None
    texts = [_find(table, names, column, flag) for column in text_columns]
    label = None
    if label_column is not None and (needs_label or _has_name(names, label_column)):
        label = _find(table, names, label_column, "--label_column")
    if label is not None and label in texts:
        raise UserError(
            f"{table.path}: column {_say([label], names)} cannot be both text and class: "
            "change --text_columns or --label_column"
        )
    if not needs_label:
        _refuse_classes_as_text(
            table, names, sample, zip(text_columns, texts, strict=True), classes
        )
    rest = [column for column in range(table.columns) if column not in texts]
    if label is None and table.columns > 1 and (needs_label or not texts):
        label = _guess_label(sample, rest, plain, classes, needs_label)
    if label is None and needs_label:
        raise UserError(
            f"{table.path} has {counted(table.columns, 'column')}, but a text and its class are "
            "needed: add the missing one, or name both with --text_columns and --label_column"
        )
    if not texts:
        texts = _guess_texts(sample, [column for column in rest if column != label], plain)
    if not texts:
        raise UserError(f"{table.path} has no column with text: name it with --text_columns")

    guessed = table.names is None or not text_columns or label_column is None
    note = _note(table, names, texts, label, header) if guessed else None
    return Columns(texts, label, header, note)


def _note(
    table: Table, names: list[str] | None, texts: list[int], label: int | None, header: bool
) -> str:
    """What the columns are taken for, in one line."""
    plural = "s" if len(texts) > 1 else ""
    where = f"text in column{plural} {_say(texts, names)}"
    if label is not None:
        where = f"class in column {_say([label], names)}, {where}"
    first = ""
    if table.names is None:
        first = ", below a header row" if header else ", no header row"
    note = f"{table.path.name}: {where}{first}"
    if table.delimiter not in ",\t":
        note += f", columns divided by {table.delimiter!r}"
    return note


def _say(columns: list[int], names: list[str] | None) -> str:
    """ "2 (title) and 3 (description)" """
    parts = [f"{i + 1} ({names[i][:_LONGEST_NAME]})" if names else str(i + 1) for i in columns]
    return " and ".join(" ".join(part.split()) for part in parts)


def _find(table: Table, names: list[str] | None, column: str, flag: str | None) -> int:
    """The index of `column`, given by exact name, by name in any case, or by number from 1.
    `flag` names it, or if it is None the run or --text_columns."""
    names = names or []
    lower = [name.lower() for name in names]
    if column in names:
        return names.index(column)
    if column.strip().lower() in lower:
        return lower.index(column.strip().lower())
    if column.isdecimal() and column.isascii() and 1 <= int(column[:9]) <= table.columns:
        return int(column) - 1
    known = ", ".join(" ".join(name.split())[:_LONGEST_NAME] for name in names[:20])
    have = f"it has {known}" if names else f"it has {table.columns}, and no header row"
    if flag is None:
        raise UserError(
            f"{table.path} has no column {column!r}, which the run was trained with unless you "
            f"named it: {have}; name this file's with --text_columns"
        )
    raise UserError(f"{table.path} has no column {column!r} ({flag}): {have}")


def _has_name(names: list[str] | None, column: str) -> bool:
    return column.strip().lower() in [name.lower() for name in names or []]


def _refuse_classes_as_text(
    table: Table,
    names: list[str] | None,
    sample: list[Row],
    text_columns: Iterable[tuple[str, int]],
    classes: Collection[str],
) -> None:
    """UserError if a column of `text_columns`, (as it was asked for, its index), holds the class. A
    number that held in the training file may mean another column here."""
    for asked, column in text_columns:
        holds_classes = _known_part(sample, column, set(classes)) >= 0.5
        if holds_classes and not _has_name(names, asked):
            raise UserError(
                f"{table.path}: column {_say([column], names)} holds classes, and --text_columns "
                f"{asked} takes it for text: name this file's columns with --text_columns"
            )


def _known_part(sample: list[Row], column: int, classes: set[str]) -> float:
    cells = [(row.cells[column] or "").strip() for row in sample]
    return sum(cell in classes for cell in cells) / max(len(cells), 1)


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def _has_header(
    table: Table,
    text_columns: Sequence[str],
    label_column: str | None,
    classes: Collection[str],
) -> bool:
    """Whether the first row names the columns."""
    rows = table.rows
    if table.names is not None or not rows or rows[0].problem is not None:
        return False
    first = [cell.strip() for cell in rows[0].cells]
    asked = [*text_columns, *([] if label_column is None else [label_column])]
    lower = [cell.lower() for cell in first]
    if any(column.strip().lower() in lower and not column.isdecimal() for column in asked):
        return True
    below = [row.cells for row in rows[1 : _SAMPLE_ROWS + 1] if row.problem is None]
    others = [cells for cells in below if cells != rows[0].cells]  # joined files repeat the header
    values = [Counter(cells[j].strip() for cells in others) for j in range(len(first))]
    is_new = [name not in found for name, found in zip(first, values, strict=True)]
    known = {name for name in compress(first, is_new) if _plain(name) in LABEL_NAMES + TEXT_NAMES}
    if known and _is_usual(first):
        return True
    # Data may begin with a known name by chance: what no header has then tells them apart.
    if known and not known & set(classes) and not any(map(_is_number, first)):
        repeated = (min(found.values(), default=0) > 1 for found in compress(values, is_new))
        enough = min(2, len(set(filter(None, first))))
        if len(known) >= enough or (len(others) >= 10 and any(repeated)):
            return True
    named = [j for j, name in enumerate(first) if name or not _is_spare(values[j], len(others))]
    if not _is_usual([first[j] for j in named]):
        return False
    all_new = all(is_new[j] for j in named)
    for j in named:
        if is_new[j] and others and not _is_number(first[j]) and all(map(_is_number, values[j])):
            return True
        # A column of few values, all of which repeat but that of the first row.
        if all_new and len(others) >= 10 and len(values[j]) <= len(others) / 5:
            return min(values[j].values()) > 1 and not _repeats(others, len(below))
    return False


def _is_usual(names: list[str]) -> bool:
    """Whether a header looks like this; the first column may lack a name, as pandas writes it."""
    short = all(len(name) <= _LONGEST_NAME for name in names)
    return short and all(names[1:]) and len(set(names)) == len(names)


def _is_spare(values: Counter[str], count: int) -> bool:
    """Whether most cells of a column are empty, as in those that spreadsheets add at the end."""
    return values[""] * 2 > count


def _repeats(others: list[list[str | None]], count: int) -> bool:
    """Whether the first row, which `others` lack of the `count` rows below it, is one of several
    that are repeated, and no header of joined files, which is rarer than they are."""
    again, distinct = count - len(others), len(set(map(tuple, others)))
    return again > 0 and 2 * distinct < len(others) <= 2 * distinct * again


def _is_number(cell: str) -> bool:
    return cell.lstrip("+-").isdecimal()


def _guess_label(
    sample: list[Row],
    columns: list[int],
    names: list[str] | None,
    classes: Collection[str],
    needs_label: bool,
) -> int | None:
    """The class, by name; else the column that holds known classes; else that of fewest values."""
    for name in LABEL_NAMES:
        for column in columns:
            if names and names[column] == name:
                return column
    if not sample or not columns:
        return None
    cells = {column: [(row.cells[column] or "").strip() for row in sample] for column in columns}
    if classes:
        known_part = {j: _known_part(sample, j, set(classes)) for j in columns}
        best = max(columns, key=lambda j: known_part[j], default=None)
        if best is not None and known_part[best] >= 0.5:
            return best
    values = {j: len(set(cells[j])) for j in columns}
    length = {j: sum(map(len, cells[j])) / len(sample) for j in columns}
    repeated = [j for j in columns if 2 <= values[j] <= max(2, len(sample) / 2)]
    if not needs_label:
        # Texts to be classified may have no class: only few, short values are taken for one.
        repeated = [j for j in repeated if length[j] <= _LONGEST_NAME and len(sample) >= 10]
        return min(repeated, key=lambda j: (values[j], length[j]), default=None)
    if repeated:
        spare = {j: _is_spare(Counter(cells[j]), len(sample)) for j in columns}
        return min(repeated, key=lambda j: (spare[j], values[j], length[j], j))
    return min(columns, key=lambda j: (length[j], j))


def _guess_texts(sample: list[Row], columns: list[int], names: list[str] | None) -> list[int]:
    """The text, by name; else all columns with several words; else that of the longest cells."""
    named = [column for column in columns if names and names[column] in TEXT_NAMES]
    if named or not columns:
        return named
    cells = {column: [(row.cells[column] or "").strip() for row in sample] for column in columns}
    wordy = [j for j in columns if sum(" " in cell for cell in cells[j]) * 2 >= len(sample)]
    return wordy or [max(columns, key=lambda j: (sum(map(len, cells[j])), -j))]
