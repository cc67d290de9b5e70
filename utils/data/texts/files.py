"""Reads CSV, TSV and JSON files, plain or gzip-compressed, into rows of text cells.

Whatever the bytes of a file are, the result is a table in which each row has either cells or the
reason why it has none, or else a `UserError`.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UserError
from .encodings import decode

KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "txt",
}
MAX_UNPACKED_BYTES = 8 << 30  # of a .gz, which may unpack to a thousand times its size
_SAMPLE_ROWS, _SAMPLE_LINES = 100, 10_000  # by which the delimiter is chosen
_SAMPLE_OBJECTS = 1000  # whose keys are the columns
_DELIMITERS = ",;\t|"
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEPARATOR = re.compile(r"\"?sep=([^\w\s\"]|\t)\"?\s*", re.IGNORECASE)
# A quote that is never closed turns the rest of the file into one row. All of it but the first line
# is then read again: this often at most.
_MAX_UNCLOSED = 20


@dataclass(frozen=True)
class Row:
    """`line` is the number, from 1, of the row's first line. A bad row has a `problem` instead
    of cells. A cell is None if its value is missing."""

    line: int
    cells: list[str | None]
    problem: str | None = None


@dataclass(frozen=True)
class Table:
    """The rows of a file. `names` are the keys of JSON objects, None for other files (whose
    first row may be a header); `columns` is the number of columns, `remark` how the text was read
    (encodings.py)."""

    path: Path
    rows: list[Row]
    columns: int
    names: list[str] | None = None
    delimiter: str = ","
    remark: str = ""


def broken_text(text: str) -> str | None:
    """What is wrong with the characters of a text, in words; None if nothing is."""
    if text.isascii():
        return None
    found = _SURROGATE.search(text)
    if found is None:
        return None
    if "\udc80" <= found[0] <= "\udcff":
        return "is not UTF-8: save it as UTF-8"
    return "has half a surrogate pair, which is not a character"


def file_kind(path: Path) -> str:
    """ "csv", "tsv", "jsonl" or "txt", by the ending. Raises UserError for any other."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    if not suffixes or suffixes[-1] not in KINDS:
        raise UserError(
            f"{path}: cannot tell the kind of file from its name: it must end in "
            f"{', '.join(KINDS)}, or one of these followed by .gz"
        )
    return KINDS[suffixes[-1]]


def read_table(path: Path, of: str = "text", encoding: str | None = None) -> Table:
    """All rows of a CSV, TSV or JSON file but the blank ones.

    Args:
        of: what has a row, for messages.
        encoding: see `decode`.

    Raises:
        UserError: it cannot be read, is empty, or is not text.
    """
    kind = file_kind(path)
    if kind == "txt":
        raise UserError(f"{path}: a file with {of}s and classes must be .csv, .tsv or .jsonl")
    text, remark = read_text_file(path, encoding)
    lines = list(io.StringIO(text, newline=""))
    if kind == "jsonl":
        table = _read_json(path, text, lines)
    else:
        table = _read_delimited(path, lines, "\t" if kind == "tsv" else None)
    if not table.rows:
        raise UserError(f"{path} is empty: give a file with a row for each {of}")
    return replace(table, remark=remark)


def read_text_file(path: Path, encoding: str | None = None) -> tuple[str, str]:
    """The text of a file, and how it was read (see `decode`).

    Raises:
        UserError: it cannot be read, or see `decode`.
    """
    with reading(path):
        data = _unpack(path) if path.suffix.lower() == ".gz" else path.read_bytes()
    text, remark = decode(path, data, encoding)
    return text.replace("\0", " "), remark


def file_sum(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, hexadecimal. Raises UserError if it cannot be read."""
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises UserError if the file is not there or cannot be read."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder: name a file in it")
        if not path.is_file():
            raise UserError(f"{path} is not there: check the name")
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {str(path)!r}: {why}") from error


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_UNPACKED_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}): compress it again") from error
    if len(data) > MAX_UNPACKED_BYTES:
        raise UserError(f"{path} unpacks to more than {MAX_UNPACKED_BYTES >> 30} GiB: split it")
    return data


# JSON: an object on each line, or an array of objects


def _read_json(path: Path, text: str, lines: list[str]) -> Table:
    """The rows of a file with this text, which is divided into `lines`. The columns are the keys of
    the first objects, in the order of their first appearance."""
    records = _read_array(path, text)
    if records is None:
        numbered = enumerate(lines, 1)
        records = [(number, _parse_json(line)) for number, line in numbered if not line.isspace()]
    names: dict[str, None] = {}
    for _, record in records[:_SAMPLE_OBJECTS]:
        names.update(dict.fromkeys(() if isinstance(record, str) else record))
    rows = [_to_row(line, record, names) for line, record in records]
    return Table(path, rows, len(names), list(names))


def _read_array(path: Path, text: str) -> list[tuple[int, dict | str]] | None:
    """(number of the element, object or what is wrong); None if the text is not an array. Raises
    UserError if it begins as one and is not valid JSON."""
    if not text.lstrip().startswith("["):
        return None
    try:
        elements = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path}: line {line} {_not_json(error)}: correct the file") from error
    return [
        (number, element if isinstance(element, dict) else "is not a JSON object")
        for number, element in enumerate(elements, 1)
    ]


def _parse_json(text: str) -> dict | str:
    """The object, or what is wrong."""
    if problem := broken_text(text):
        return problem
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits, too
        return _not_json(error)
    return record if isinstance(record, dict) else "is not a JSON object: expected one {...} a line"


def _not_json(error: Exception) -> str:
    return f"is not valid JSON ({getattr(error, 'msg', None) or error})"


def _to_row(line: int, record: dict | str, names: dict[str, None]) -> Row:
    if isinstance(record, str):
        return Row(line, [], record)
    cells: list[str | None] = []
    for name in names:
        cell = _to_cell(record.get(name))
        problem = cell and broken_text(cell)
        if problem:
            return Row(line, [], problem)
        cells.append(cell)
    return Row(line, cells)


def _to_cell(value: object) -> str | None:
    if isinstance(value, str):
        return value.replace("\0", " ")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) else None


# CSV and TSV


def _read_delimited(path: Path, lines: list[str], delimiter: str | None) -> Table:
    """`delimiter` None: the one that the first line gives as "sep=;", as for Excel, or else chosen
    among comma, semicolon, tab and bar."""
    if delimiter is None and lines and (given := _SEPARATOR.fullmatch(lines[0])):
        delimiter, lines = given[1], ["\n", *lines[1:]]
    if delimiter is None:
        delimiter = _choose_delimiter(lines[:_SAMPLE_LINES])
    rows = list(_parse(lines, delimiter))
    columns = _columns(rows)
    if _bad(rows, columns):
        # Many programs do not escape quotes in TSV; in CSV, a space may come before a quote.
        other = {"quoting": csv.QUOTE_NONE} if delimiter == "\t" else {"skipinitialspace": True}
        plain = list(_parse(lines, delimiter, **other))
        if _bad(plain, _columns(plain)) < _bad(rows, columns):
            rows, columns = plain, _columns(plain)
    return Table(path, [_check_row(row, columns) for row in rows], columns, None, delimiter)


def _check_row(row: Row, columns: int) -> Row:
    if row.problem is not None:
        return row
    if len(row.cells) != columns:
        return Row(row.line, [], f"has {len(row.cells)} columns where the others have {columns}")
    for cell in row.cells:
        problem = broken_text(cell)
        if problem:
            return Row(row.line, [], problem)
    return row


def _columns(rows: list[Row]) -> int:
    """The number of columns that most rows have."""
    counts = Counter(len(row.cells) for row in rows if row.problem is None)
    return counts.most_common(1)[0][0] if counts else 0


def _bad(rows: list[Row], columns: int) -> int:
    return sum(row.problem is not None or len(row.cells) != columns for row in rows)


def _choose_delimiter(lines: list[str]) -> str:
    """The delimiter that gives most rows the same number of columns, two or more; or a comma."""

    def agreement(delimiter: str) -> float:
        rows = list(itertools.islice(_parse(lines, delimiter), _SAMPLE_ROWS))
        columns = _columns(rows)
        return 1 - _bad(rows, columns) / len(rows) if columns > 1 else 0

    return max(_DELIMITERS, key=agreement)


def _parse(lines: list[str], delimiter: str, **options) -> Iterator[Row]:
    """If a row cannot be parsed, only its first line is given up: the next row begins after it.
    `options` are those of csv.reader."""
    start, unclosed = 0, 0  # `start`: lines before the row
    with _any_field_size():
        while start < len(lines):
            offset = start
            reader = csv.reader(
                map(lines.__getitem__, range(start, len(lines))),
                delimiter=delimiter,
                strict=True,
                **options,
            )
            try:
                for cells in reader:
                    if len(cells) > 1 or (cells and not cells[0].isspace()):  # "" is an empty cell
                        yield Row(start + 1, cells)
                    start = offset + reader.line_num
                return
            except csv.Error as error:
                yield Row(start + 1, [], _explain(error))
                start, unclosed = start + 1, unclosed + _is_unclosed(error)
                if unclosed == _MAX_UNCLOSED and start < len(lines):
                    yield Row(start + 1, [], "and all that follow it have quotes never closed")
                    return


def _is_unclosed(error: csv.Error) -> bool:
    return "end of data" in str(error)


def _explain(error: csv.Error) -> str:
    if _is_unclosed(error):
        return "has a quote that is never closed"
    return 'has a stray " (inside of quotes it must be doubled)'


@contextlib.contextmanager
def _any_field_size() -> Iterator[None]:
    """Lifts the csv module's limit on a field, which is global, and 128 KiB by default."""
    before = csv.field_size_limit(1 << 40)
    try:
        yield
    finally:
        csv.field_size_limit(before)
