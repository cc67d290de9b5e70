"""Hides what libraries print for their own developers."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hides warnings, log lines, and what Python code prints, such as those of PyTorch's exporters
    to ONNX."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
