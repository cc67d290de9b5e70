"""What makes runs in the process of a test quick, and leaves the process as it was."""

import contextlib
import signal
import sys

import pytest

from utils.data.images import shapes
from utils.data.texts import headlines
from utils.training.objective import Classification


def quick(patch: pytest.MonkeyPatch) -> None:
    """A run takes a third of its time: the built-in data sets have up to 600 samples to train on
    and 100 to test on, and curves.png is empty (tests/reporting/test_plots.py draws it)."""
    for data, classes in ((shapes, 10), (headlines, 4)):
        patch.setattr(data, "TRAIN_PER_CLASS", 600 // classes)
        patch.setattr(data, "TEST_PER_CLASS", 100 // classes)
    patch.setattr(
        "utils.runs.summary.draw_curves", lambda records, path, title: path.write_bytes(b"")
    )


@contextlib.contextmanager
def handlers_put_back():
    """The signal handlers are afterwards what they were before."""
    kinds = signal.SIGINT, signal.SIGTERM, signal.SIGALRM
    before = {number: signal.getsignal(number) for number in kinds}
    unraisable = sys.unraisablehook
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable


def raise_in_step(patch: pytest.MonkeyPatch, step: int, *signums: int) -> None:
    """The signals arrive, one after the other, in the midst of that step."""
    forward, calls = Classification.__call__, []

    def call(self, *arguments):
        calls.append(arguments)
        if len(calls) == step:
            for signum in signums:
                signal.raise_signal(signum)
        return forward(self, *arguments)

    patch.setattr(Classification, "__call__", call)
