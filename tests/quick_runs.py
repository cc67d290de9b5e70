"""Makes runs within the test process quick, and leaves that process as it was."""

import contextlib
import signal
import sys
from pathlib import Path

import pytest
import torch

from utils.data.images import shapes
from utils.data.texts import headlines
from utils.training.objective import Classification

# On the PYTHONPATH of a process it makes the runs of that process quick.
QUICK_PROCESSES = str(Path(__file__).with_name("quick_processes"))


def quick(patch: pytest.MonkeyPatch) -> None:
    """Cuts the time of a run to a third: the built-in data sets have up to 600 samples to train on
    and 100 to test on, and curves.png, confusion.png and report.html are empty
    (tests/reporting/test_plots.py, test_classes.py and test_run_page.py have whole ones)."""
    for data, classes in ((shapes, 10), (headlines, 4)):
        patch.setattr(data, "TRAIN_PER_CLASS", 600 // classes)
        patch.setattr(data, "TEST_PER_CLASS", 100 // classes)
    for module in ("report", "time_budget"):
        patch.setattr(
            f"utils.runs.{module}.draw_curves", lambda records, path, *_: path.write_bytes(b"")
        )
    patch.setattr("utils.reporting.classes.draw_confusions", lambda *_: None)
    patch.setattr("utils.reporting.classes.save_figure", lambda _, path: path.write_bytes(b""))
    patch.setattr(
        "utils.runs.report.write_run_page",
        lambda folder, *_: (folder / "report.html").write_bytes(b""),
    )


@contextlib.contextmanager
def handlers_put_back():
    """Restores the signal handlers at the end, and what --deterministic has changed."""
    kinds = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM
    before = {number: signal.getsignal(number) for number in kinds}
    unraisable = sys.unraisablehook
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable
        torch.use_deterministic_algorithms(deterministic)


def raise_in_step(patch: pytest.MonkeyPatch, step: int, *signums: int) -> None:
    """Raises these signals, one after the other, in the middle of that step."""
    forward, calls = Classification.__call__, []

    def call(self, *arguments):
        calls.append(arguments)
        if len(calls) == step:
            for signum in signums:
                signal.raise_signal(signum)
        return forward(self, *arguments)

    patch.setattr(Classification, "__call__", call)
