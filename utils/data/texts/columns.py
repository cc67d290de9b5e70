"""Finds which columns of a table hold the text and the class, and whether it begins with a header.

What the user does not specify is taken from the columns' names, and else from their content where
that leaves no doubt, for each file by itself; in doubt the user is asked. `Columns.note` says in
one line which columns are taken.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...plural import counted
from .files import Table

# The first of LABEL_NAMES that a header has is the class; all of TEXT_NAMES in it are text.
LABEL_NAMES = (
    "label", "labels", "class", "class index", "category", "target", "sentiment", "topic",
    "polarity", "intent", "stars", "rating", "class name", "label text", "gold label", "y",
    "class id", "label id", "category id",
)  # fmt: skip
TEXT_NAMES = (
    "text", "texts", "title", "description", "sentence", "content", "contents", "body", "headline",
    "headlines", "review", "review text", "review body", "comment", "message", "tweet", "question",
    "document", "article", "abstract", "news", "subject", "short description", "utterance",
    "sentence1", "sentence2", "premise", "hypothesis",
)  # fmt: skip
# Neither of these, unless the user says so.
OTHER_NAMES = (
    "id", "uuid", "index", "idx", "number", "unnamed: 0", "date", "time", "datetime", "timestamp",
    "at", "on", "by", "author", "user", "username", "name", "email", "url", "link", "language",
    "country", "city", "phone", "ip", "split",
)  # fmt: skip
_SURE_NAMES = ("label", "labels", "class", "text", "texts")  # of columns, even where others are odd
_SAMPLE_ROWS = 2000  # that are looked at
_LONGEST_NAME = 40  # characters of a column's name
_SHOWN = 5  # columns in a message
# Two words, or a few letters of a script without spaces.
_WORDY = re.compile(
    r".*?(\S\s+\S|[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{5}).*", re.DOTALL
)
_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?")
_NO_NUMBER = re.compile(r"(?!(na|n/a|nan|null|none|unknown)$)[^\W\d_]", re.IGNORECASE)
# Digits, signs, and the words of dates and amounts in a few languages, by their beginnings.
_NUMBER_OR_DATE = re.compile(
    r"(?=.{0,39}\d)([\W\d_]|(jan|feb|fev|fév|mar|mär|mrt|abr|apr|avr|may|mai|mag|jun|jui|jul|giu|lug|"
    r"aug|ago|aoû|set|sep|oct|okt|ott|nov|dec|dez|dic|déc|mon|tue|wed|thu|fri|sat|sun|am|pm|utc|gmt|"
    r"[pmce][ds]t(?![^\W\d_])|ces?t(?![^\W\d_])|"
    r"янв|фев|мар|апр|мая|июн|июл|авг|сен|окт|ноя|дек|[年月日时分秒時년월일]|eur|usd|"
    r"([tz]|de|of|at|um|uhr|st|nd|rd|th)(?![^\W\d_]))[^\W\d_]{0,6}+){1,40}",
    re.IGNORECASE,
)
_PERSON = re.compile(r"[^\W\d_a-z][\w.'’-]*( [a-z]{2,3})?( [^\W\d_a-z][\w.'’-]*){1,2}")
# An identifier, an address: no spaces, but a digit or a sign.
_CODE = re.compile(r"(?=.*[\d@/_])\S+")


@dataclass(frozen=True)
class Columns:
    """Columns are counted from 0. `label` and `group` are None if the table has no such column."""

    texts: list[int]
    label: int | None
    header: bool
    note: str
    group: int | None = None


def choose_columns(
    table: Table,
    text_columns: Sequence[str],
    label_column: str | None,
    *,
    classes: Collection[str] = (),
    needs_label: bool = True,
    header: bool | None = None,
    group_column: str | None = None,
) -> Columns:
    """The columns named by the user, and found for those that are not.

    Args:
        text_columns: names of columns, or their numbers from 1; empty: to be found.
        label_column: likewise; None: to be found. If no class is needed, it is that of the training
            file, by name.
        classes: names of the classes in the training data, if they are known.
        needs_label: whether a table without a class is an error.
        header: whether the first row names the columns, unless a class in it says that it does not;
            None: to be found.
        group_column: see `find_group_column`.

    Raises:
        UserError: a column is missing or both text and class, the table has too few, or the user
            has to say which they are.
    """
    asked = [*text_columns, *([label_column] if label_column is not None else [])]
    classes = set(classes)
    if table.names is not None or not table.rows or table.rows[0].problem is not None:
        header = False
    else:
        header = _has_header(table, asked, classes, needs_label, header)
    names = table.names or []
    if header:
        names = [cell.strip() for cell in table.rows[0].cells]
    sample = [row for row in table.rows[header : _SAMPLE_ROWS + header] if row.problem is None]
    cells = [[(row.cells[j] or "").strip() for row in sample] for j in range(table.columns)]

    flag = "--text_columns" if needs_label else None
    texts = [find_column(table, names, column, flag) for column in text_columns]
    label = None
    if label_column is not None and (needs_label or _has_name(names, label_column)):
        label = find_column(table, names, label_column, "--label_column")
    if label is not None and label in texts:
        raise UserError(
            f"{table.path}: column {_say([label], names)} cannot be both text and class: "
            "change --text_columns or --label_column"
        )
    for column, index in zip(text_columns, texts, strict=True):
        # A number that held in the training file may mean another column here.
        by_number = not needs_label and not _has_name(names, column)
        if by_number and _known_part(cells[index], classes) >= 0.5:
            raise UserError(
                f"{table.path}: column {_say([index], names)} holds classes, and --text_columns "
                f"{column} takes it for text: name this file's columns with --text_columns"
            )
    group = find_group_column(table, names, group_column, required=not classes)
    rest = [column for column in range(table.columns) if column not in texts]
    if label is None and table.columns > 1 and (needs_label or not texts):
        label = _guess_label(table, cells, rest, names, classes, needs_label)
    if label is None and needs_label:
        raise UserError(
            f"{table.path} has {counted(table.columns, 'column')}, but a text and its class are "
            "needed: add the missing one, or name both with --text_columns and --label_column"
        )
    if not texts:
        texts = _guess_texts(table, cells, [j for j in rest if j not in (label, group)], names)
    note = _note(table, names, texts, label, header, group)
    return Columns(texts, label, header, note, group)


def _note(
    table: Table, names: list[str], texts: list[int], label: int | None, header: bool,
    group: int | None,
) -> str:  # fmt: skip
    """What the columns are taken for, and which are not, in one line."""
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
    unread = [column for column in range(table.columns) if column not in (label, group, *texts)]
    if names and unread:
        note += f", without {_say(unread[:_SHOWN], names)}"
        note += f" and {len(unread) - _SHOWN} more" * (len(unread) > _SHOWN)
    return note + table.remark


def _say(columns: list[int], names: list[str], last: str = "and") -> str:
    """ "2 (title) and 3 (description)" """
    named = {i: names[i][:_LONGEST_NAME] for i in columns} if names else {}
    parts = [f"{i + 1} ({named[i]})" if named.get(i) else str(i + 1) for i in columns]
    return f" {last} ".join(" ".join(part.split()) for part in parts)


def find_column(table: Table, names: list[str], column: str, flag: str | None) -> int:
    """The index of `column`, given by exact name, by name in any case, or by number from 1.
    `flag` names it, or if it is None the run or --text_columns."""
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
    raise UserError(
        f"{table.path} has no column {column!r} ({flag}): {have}; name one of these by {flag}"
    )


def find_group_column(
    table: Table, names: list[str], column: str | None, required: bool
) -> int | None:
    """The index of --group_column; None if it is not given, or if the table has none of that name
    and is not `required` to."""
    if column is None or not (required or _has_name(names, column)):
        return None
    return find_column(table, names, column, "--group_column")


def _has_name(names: list[str], column: str) -> bool:
    return column.strip().lower() in [name.lower() for name in names]


def _known_part(cells: Sequence[str], classes: Collection[str]) -> float:
    return sum(cell in classes for cell in cells) / max(len(cells), 1)


def _plain(name: str) -> str:
    """ "review text" for review_text, Review-Text and reviewText"""
    return " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])|[_-]", " ", name).lower().split())


def _kind(name: str) -> str:
    """ "label", "text" or "other", also of names such as post_body; "" if it is not known."""
    plain = _plain(name)
    last = "" if re.search(r"\s", name) else plain.split(" ")[-1]
    kinds = (("label", LABEL_NAMES), ("text", TEXT_NAMES), ("other", OTHER_NAMES))
    found = [kind for part in (plain, last) for kind, names in kinds if part in names]
    return next(iter(found), "label" if re.match(r"(is|has)[_A-Z]|v\d$", name) else "")


def _has_header(
    table: Table, asked: list[str], classes: set[str], needs_label: bool, answer: bool | None
) -> bool:
    """Whether the first row names the columns: by names that are `asked` for or known, by the
    user's `answer`, or by what leaves no doubt."""
    rows = table.rows
    first = [cell.strip() for cell in rows[0].cells]
    lower = [cell.lower() for cell in first]
    if any(column.strip().lower() in lower and not column.isdecimal() for column in asked):
        return True
    below = [row.cells for row in rows[1 : _SAMPLE_ROWS + 1] if row.problem is None]
    below = [cells for cells in below if cells != rows[0].cells]  # joined files repeat the header
    columns = [[cells[j].strip() for cells in below] for j in range(len(first))]
    is_new = {name: name not in found for name, found in zip(first, columns, strict=True) if name}
    known = {name for name, new in is_new.items() if new and _kind(name)} - classes
    if answer is None and known:
        alike = len(known) >= min(2, len(is_new)) or not re.search(r"\s", "".join(is_new))
        if alike or any(_plain(name) in _SURE_NAMES for name in known):
            return True
    if classes.intersection(first):
        return False
    if answer is not None:
        return answer
    is_counted = first == [str(j) for j in range(len(first))]  # as pandas names columns
    if any(map(_NUMBER.fullmatch, first)) and not is_counted:
        return False
    if not (below and all(is_new.values())):
        return False
    numbers = [name for name, c in zip(first, columns, strict=True) if _part(_NUMBER, c) == 1]
    longest = max(map(len, first))
    if longest <= _LONGEST_NAME and any(map(_NO_NUMBER.match, numbers)):
        return True
    if longest > _LONGEST_NAME and not needs_label:
        return False
    shown = " and ".join(repr(" ".join(name.split())[:_LONGEST_NAME]) for name in [*is_new][:2])
    raise UserError(
        f"{table.path}: does its first row ({shown}) name the columns? Give --header if it does, "
        "--no_header if it is a row like the others"
    )


def _part(pattern: re.Pattern, cells: Sequence[str]) -> float:
    """The fraction of the cells that are not empty which have this pattern."""
    cells = [cell for cell in cells if cell]
    return sum(pattern.fullmatch(cell) is not None for cell in cells) / max(len(cells), 1)


def _is_spare(cells: Sequence[str]) -> bool:
    """Whether most cells of a column are empty, as in those that spreadsheets add at the end."""
    return cells.count("") * 2 > len(cells)


def _guess_label(
    table: Table,
    cells: list[list[str]],
    columns: list[int],
    names: list[str],
    classes: Collection[str],
    needs_label: bool,
) -> int | None:
    """The class, by name; else the column that holds known classes; else the only one of few
    values, which are no texts."""
    for known in LABEL_NAMES:
        for column in columns:
            if names and _plain(names[column]) == known:
                return column
    rows = len(cells[0]) if cells else 0
    if not rows or not columns:
        return None
    best = max(columns, key=lambda j: _known_part(cells[j], classes))
    if _known_part(cells[best], classes) >= 0.5:
        return best
    values = {j: len(set(cells[j])) for j in columns}
    length = {j: sum(map(len, cells[j])) / rows for j in columns}
    repeated = [j for j in columns if 2 <= values[j] <= max(2, rows / 2)]
    if not needs_label:
        # Texts to be classified may have no class: only few, short values are taken for one.
        repeated = [j for j in repeated if length[j] <= _LONGEST_NAME and rows >= 10]
        return min(repeated, key=lambda j: (values[j], length[j]), default=None)
    plain = [j for j in repeated if not _is_spare(cells[j])]
    plain = [j for j in plain if not names or _kind(names[j]) != "other"]
    short = [j for j in plain if values[j] <= rows / 20 or _part(_WORDY, cells[j]) < 0.5]
    found = short or plain or repeated or columns
    if table.columns == 2:
        found = [min(found, key=lambda j: (values[j], length[j], j))]
    if len(found) > 1:
        raise UserError(
            f"{table.path}: the class may be in column {_say(found[:_SHOWN], names, 'or')}: name "
            "it with --label_column"
        )
    return found[0]


def _guess_texts(
    table: Table, cells: list[list[str]], columns: list[int], names: list[str]
) -> list[int]:
    """The text, by name; else all columns with several words; else the only one that is left.
    Numbers and dates are none, names of people and identifiers only if nothing else is there."""
    found = [j for j in columns if _part(_NUMBER_OR_DATE, cells[j]) < 0.9]
    if names:
        exact = [j for j in found if _plain(names[j]) in TEXT_NAMES]
        if named := exact or [j for j in found if _kind(names[j]) == "text"]:
            return named
        found = [j for j in found if _kind(names[j]) != "other"]
    wordy = [j for j in found if _part(_WORDY, cells[j]) >= 0.5 and not _is_spare(cells[j])]
    if wordy := [j for j in wordy if _part(_PERSON, cells[j]) < 0.9]:
        return wordy
    found = [j for j in found if not _is_spare(cells[j])] or found
    found = [j for j in found if _part(_CODE, cells[j]) < 0.9] or found
    if len(found) == 1:
        return found
    where = f"may be in column {_say(found[:_SHOWN], names, 'or')}" if found else "is in no column"
    raise UserError(
        f"{table.path}: the text {where} (dates, numbers, names and identifiers are left out): "
        "name it with --text_columns"
    )
