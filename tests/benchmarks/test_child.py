"""Child: an object of a benchmark in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until

from benchmarks import child
from benchmarks.budget import ChildError, OutOfTime, at_most
from benchmarks.child import Child


class Contender:
    """Five steps fail, six end the process, none never end; others take memory."""

    def __init__(self):
        self.block, self.helper = (b"." * (300 << 20))[:1], None

    def steps(self, count: int) -> float:
        if count == 5:
            raise ValueError("no | more\nlines")
        if count == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        while count == 0:
            pass
        self.block = b"." * (count << 20)
        return float(count)

    def where(self) -> dict:
        return {"process": os.getpid(), "more": os.environ.get("MORE")}

    def help(self) -> int:
        """Starts a helper process, as compilers and data loaders do."""
        self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        return self.helper.pid


def broken():
    raise ValueError("not to be made")


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # its parent has not waited for it yet


def test_steps_and_memory_are_those_of_another_process(monkeypatch):
    monkeypatch.setattr(child, "SECONDS_TO_END", PATIENCE)
    one = Child(Contender, {"MORE": "yes"})
    before = one.peak_rss()
    assert before < 100 << 20  # without the peak of its creation
    assert one.call("steps", 400) == 400 and one.call("steps", 2) == 2
    assert one.call("where") == {"process": one.process.pid, "more": "yes"}
    assert one.process.pid != os.getpid() and "MORE" not in os.environ
    assert one.peak_rss() - before >= 200 << 20  # the peak
    one.close()
    assert one.process.exitcode == 0


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (5, "ValueError: no / more"),
        (6, "its process was killed, perhaps because memory ran out"),
    ],
)
def test_a_failure_is_reported_and_ends_the_process(steps, reason):
    one = Child(Contender)
    for expected in (reason, "its process is gone"):
        with pytest.raises(ChildError) as told:
            one.call("steps", steps)
        assert str(told.value) == expected and not one.process.is_alive()
    one.close()


def test_a_call_that_takes_too_long_ends_the_process_and_its_helpers():
    one = Child(Contender)
    helper = one.call("help")
    with pytest.raises(OutOfTime), at_most(0.5):
        one.call("steps", 0)
    assert one.process.exitcode == -9
    wait_until(lambda: gone(helper), "the helper is left")


def test_an_object_that_cannot_be_made_says_why():
    with pytest.raises(ChildError, match="ValueError: not to be made"):
        Child(broken)


PARENT = """
import signal, time
from benchmarks.child import Child
from test_child import Contender

if __name__ == "__main__":
    # Even where these tests run in the background of a shell, which has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    one = Child(Contender)
    print(one.process.pid, one.call("help"), flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_parent(signum, tmp_path):
    """With its helper, while it waits for a call; Ctrl-C does not wait for them."""
    script, here = tmp_path / "parent.py", Path(__file__).parent
    script.write_text(PARENT)
    paths = os.pathsep.join(map(str, (here.parents[1], here.parent, here)))
    parent = subprocess.Popen(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.send_signal(signum)
    parent.wait(PATIENCE)
    wait_until(lambda: all(map(gone, pids)), "a process is left")
