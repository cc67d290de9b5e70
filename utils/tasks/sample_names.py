"""What tells a user which samples a split has: files, or lines of a table."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..data.images.image_data import PictureSplit
from ..data.texts.columns import find_column
from ..data.texts.files import file_kind, read_table
from ..data.texts.token_store import TokenSplit
from ..data.texts.tokenizer import decoded, tokenizer_from_json
from ..errors import UserError
from ..reporting.answers import SampleNames
from ..reporting.csv_fields import safe_path, safe_text

# Columns of the tables of answers, which --id_columns may name, too.
TAKEN = ["file", "line", "text", "split", "true", "class", "predicted", "probability", "loss"]
TAKEN += ["suggested", "quality", "label"]


def picture_names(split: PictureSplit) -> SampleNames:
    """By files; pictures that do not lie in files of their own by their numbers, from 0."""
    rows = range(len(split)) if split.rows is None else split.rows

    def picture(sample: int) -> np.ndarray:
        return split.picture(int(rows[sample]))

    if not len(split) or split.name(0) is None:
        return SampleNames(["number"], lambda: ([str(row)] for row in rows), picture=picture)

    def cells() -> Iterator[list[str]]:
        for sample in range(len(split)):
            yield [safe_path(str(split.name(sample)))]

    return SampleNames(["file"], cells, picture=picture)


def text_names(
    split: TokenSplit,
    tokenizer: str,
    path: Path | None,
    id_columns: Sequence[str] = (),
    encoding: str | None = None,
) -> SampleNames:
    """By the line of their file, and its cells in --id_columns; texts without lines by their
    numbers, from 0.

    Args:
        tokenizer: JSON.
        path: of the file.
    """

    def texts() -> Iterator[str]:
        return decoded(tokenizer_from_json(tokenizer), split.tokens, split.offsets)

    if split.lines is None or path is None:
        return SampleNames(["number"], lambda: ([str(i)] for i in range(len(split))), texts)
    file = safe_path(str(path))

    def cells() -> Iterator[list[str]]:
        ids, missing = ids_of_lines(path, id_columns, encoding), [""] * len(id_columns)
        for line in split.lines.tolist():
            yield [file, str(line), *ids.get(line, missing)]

    return SampleNames(["file", "line", *id_headings(id_columns)], cells, texts)


def id_headings(columns: Sequence[str]) -> list[str]:
    """The names of --id_columns in a table of answers."""
    return [f"{name}_in_file" if name.lower() in TAKEN else name for name in columns]


def ids_of_lines(path: Path, columns: Sequence[str], encoding: str | None) -> dict[int, list[str]]:
    """The cells in these columns, none of them a formula, of each line at which a row begins.

    Raises:
        UserError: the file cannot be read, or does not have these columns.
    """
    if not columns:
        return {}
    if file_kind(path) == "txt":
        raise UserError(f"--id_columns: {path} has no columns; leave the flag out")
    table = read_table(path, encoding=encoding)
    names = table.names or [(cell or "").strip() for cell in table.rows[0].cells]
    places = [  # without a header the first row has no names, which a number might be
        find_column(table, [] if column.isdecimal() else names, column, "--id_columns")
        for column in columns
    ]
    return {
        row.line: [safe_text(row.cells[place] or "") for place in places]
        for row in table.rows
        if row.problem is None
    }
