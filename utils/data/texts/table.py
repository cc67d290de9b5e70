"""A table of text cells, as it is read from a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SURROGATE = re.compile("[\ud800-\udfff]")


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
