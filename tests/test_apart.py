"""A benchmark's contender in a process of its own."""

import os
import signal

import pytest

from benchmarks.apart import Apart, taken_at_most
from benchmarks.budget import OutOfTime, Told, at_most


class Contender:
    """A step takes a second, the fifth fails, the sixth ends the process; none never end."""

    def __init__(self):
        self.block = b""

    def steps(self, count: int) -> float:
        if count == 5:
            raise ValueError("no | more\nlines")
        if count == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        while count == 0:
            pass
        self.block = os.urandom(count << 20)
        return float(count)

    def shares(self) -> dict[str, float]:
        return {"process": os.getpid()}


def broken():
    raise ValueError("not to be made")


def test_one_takes_its_steps_elsewhere():
    one = Apart(Contender)
    before = one.peak()
    assert one.steps(40) == 40 and one.steps(2) == 2
    assert one.shares() == {"process": one.process.pid} != {"process": os.getpid()}
    assert one.peak() - before >= 30 << 20  # of what was there at most
    one.close()
    assert one.process.exitcode == 0


@pytest.mark.parametrize(
    ("steps", "reason"), [(5, "ValueError: no / more"), (6, "its process ended with -9")]
)
def test_one_that_fails_says_why_and_is_gone(steps, reason):
    one = Apart(Contender)
    for expected in (reason, "its process is gone"):
        with pytest.raises(Told) as told:
            one.steps(steps)
        assert str(told.value) == expected and not one.process.is_alive()
    one.close()


def test_one_that_takes_too_long_is_ended():
    one = Apart(Contender)
    with pytest.raises(OutOfTime), at_most(0.5):
        one.steps(0)
    assert one.process.exitcode == -9


def test_one_that_cannot_be_made():
    with pytest.raises(Told, match="ValueError: not to be made"):
        Apart(broken)


def test_memory_is_that_of_this_process():
    assert 1 << 20 < taken_at_most() < 1 << 40
