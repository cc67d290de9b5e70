"""benchmarks/host_memory.py."""

import pytest

from benchmarks.host_memory import CASES, Passes, in_a_process


@pytest.mark.slow
def test_the_memory_of_a_process_is_measured():
    case = CASES["narrow"]._replace(batch=2)
    found = in_a_process(case, "memory", "kept", steps=1, threads=1)
    assert found["speed"] > 0 and 0 <= found["after_two"] <= found["after_all"] < 8


def test_both_kinds_of_network():
    for key in ("narrow", "transformer"):
        passes = Passes(CASES[key]._replace(batch=2), "memory", threads=1)
        assert len(passes.take(2)) == 2
