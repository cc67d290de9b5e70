"""The CSV file of predictions: whole or not there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from torch import nn

from ..errors import UserError
from ..files import written_aside


@contextlib.contextmanager
def predictions_file(path: str | Path) -> Iterator[TextIO]:
    """The file `path`, in UTF-8, which is replaced only if the block ends without an error."""
    with (
        written_aside(path) as aside,
        open(aside, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        yield file


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def not_a_number(sample: str) -> UserError:
    return UserError(
        f"the model's answer to {sample} is not a number: try --precision fp32, or another "
        "checkpoint"
    )
