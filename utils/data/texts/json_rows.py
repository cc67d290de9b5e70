"""Reads rows from JSON: an object on each line, or an array of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from utils.data.texts.table import Row, Table, broken_text

_SAMPLE_OBJECTS = 1000
_BETWEEN = re.compile(r"[\s,]*")


def read_json(path: Path, text: str, lines: list[str]) -> Table:
    """The rows of a file with this text, which is divided into `lines`. The columns are the keys of
    the first objects, in the order of their first appearance."""
    records = _read_array(text)
    if records is None:
        records = [
            (line, *_parse_json(line_text))
            for line, line_text in enumerate(lines, 1)
            if not line_text.isspace()
        ]
    names: dict[str, None] = {}
    for _, record, _ in records[:_SAMPLE_OBJECTS]:
        names.update(dict.fromkeys(record or ()))
    rows = [
        Row(line, [], problem) if record is None else _to_row(line, record, names)
        for line, record, problem in records
    ]
    return Table(path, rows, len(names), list(names))


def _read_array(text: str) -> list[tuple[int, dict | None, str]] | None:
    """(line, record, problem) of each element, up to the first error in the JSON; None if the text
    is not an array. If all are on one line, they are counted instead."""
    first, _, rest = text.strip().partition("\n")
    if not first.startswith("[") or (rest and _is_json(first)):
        return None
    records: list[tuple[int, dict | None, str]] = []
    try:
        for line, element in _elements(text):
            number = line if rest else len(records) + 1
            if isinstance(element, dict):
                records.append((number, element, ""))
            else:
                records.append((number, None, "is not a JSON object"))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or text.count("\n") + 1
        why = getattr(error, "msg", None) or error
        records.append((line, None, f"is not valid JSON ({why})"))
    return records


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _elements(text: str) -> Iterator[tuple[int, object]]:
    """(line, element) of the array that `text` is. Raises ValueError if it is none."""
    decoder, line, before = json.JSONDecoder(), 1, 0
    start = _BETWEEN.match(text, text.index("[") + 1).end()
    while not text.startswith("]", start):
        line, before = line + text.count("\n", before, start), start
        element, end = decoder.raw_decode(text, start)
        yield line, element
        start = _BETWEEN.match(text, end).end()
    if text[start + 1 :].strip():
        raise ValueError("more than an array")


def _parse_json(text: str) -> tuple[dict | None, str]:
    problem = broken_text(text)
    if problem:
        return None, problem
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits, too
        return None, f"is not valid JSON ({getattr(error, 'msg', None) or error})"
    if not isinstance(record, dict):
        return None, "is not a JSON object: expected one {...} a line"
    return record, ""


def _to_row(line: int, record: dict, names: dict[str, None]) -> Row:
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
