"""How long each part of a benchmark may take, and why one is left out."""

import time

from patience import PATIENCE

from benchmarks.budget import attempt, in_a_line


def test_reasons_for_leaving_out():
    left_out = {}
    with attempt("late", 0.05, left_out):
        time.sleep(PATIENCE)
    with attempt("never", -1, left_out):
        time.sleep(PATIENCE)
    with attempt("well", PATIENCE, left_out):
        pass
    assert left_out == {"late": "not done after 0 s", "never": "no time was left"}
    assert in_a_line(ValueError("a | b\nc")) == "ValueError: a / b"
