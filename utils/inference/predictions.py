"""The CSV file of predictions: whole or not there, without formulas for a spreadsheet to run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from torch import nn

from utils.errors import UserError
from utils.files import written_aside

# A spreadsheet takes a cell that begins with one of these for a formula, which may fetch data or
# start programs: OWASP, "CSV injection".
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@contextlib.contextmanager
def predictions_file(path: str | Path, model: nn.Module) -> Iterator[TextIO]:
    """The file `path`, in UTF-8, which is replaced only if the block ends without an error. In the
    block `model` is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        with (
            written_aside(path) as aside,
            open(aside, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            yield file
    finally:
        model.train(training)


def not_a_number(sample: str) -> UserError:
    return UserError(
        f"the model's answer to {sample} is not a number: try --precision fp32, or another "
        "checkpoint"
    )


def quoted(text: str) -> str:
    """`text` as a field of a CSV file, quoted where it must be (RFC 4180)."""
    if any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def safe_path(path: str) -> str:
    """A path to the same file that is no formula: `./=1.png` for `=1.png`."""
    return os.path.join(".", path) if path.startswith(_FORMULA) else path


def safe_text(text: str) -> str:
    """`text`, after an apostrophe if it would be a formula; a number is not one."""
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
