"""Launch-bound or not, with a simulated host and GPU that work side by side."""

from types import SimpleNamespace

import pytest

from utils.engines.launch_bound import TIMED, LaunchBound


class Machine:
    """Times in ms. The GPU begins a step at its first launch and ends it no earlier than its last
    launch."""

    def __init__(self, host: float, device: float):
        self.host, self.device = host, device
        self.now = self.free = 0.0  # the host's clock; when the GPU will be idle

    def mark(self):
        at = max(self.now, self.free)
        return SimpleNamespace(
            at=at, query=lambda: at <= self.now, elapsed_time=lambda end: end.at - at
        )

    def step(self, launches: LaunchBound, usual=True, host=None):
        launches.begin(usual)
        begun = max(self.now, self.free)
        self.now += self.host if host is None else host
        self.free = max(begun + self.device, self.now + 0.1)
        launches.end()
        self.now += 0.2  # the loader, the progress bar

    def wait(self):
        self.now = max(self.now, self.free)


def judged(host: float, device: float, log_every: int = 5, steps: int = 40):
    """(verdict, steps before it was known)."""
    machine = Machine(host, device)
    launches = LaunchBound(machine.mark, lambda: machine.now / 1000)
    machine.step(launches, usual=False, host=3000.0)
    machine.wait()
    for number in range(1, steps + 1):
        if launches.verdict() is not None:
            return launches.verdict(), number
        machine.step(launches)
        if number % log_every == 0:
            machine.wait()
    return None, steps


@pytest.mark.parametrize(
    ("host", "device", "verdict"),
    [
        (12, 6, True),
        (12, 1, True),
        (3, 2.9, True),
        (12, 14, True),
        (12, 16, False),
        (12, 45, False),
    ],
)
def test_the_slower_of_host_and_device_decides(host, device, verdict):
    assert judged(host, device)[0] is verdict


def test_launch_bound_steps_are_recognized_at_once():
    assert judged(12, 6)[1] == TIMED + 1


def test_otherwise_only_steps_after_a_wait_are_timed():
    """The second step of the run and the first ones after the next two log lines: 1, 6 and 11. The
    GPU has finished the last of them when the host begins step 15."""
    assert TIMED == 3 and judged(12, 45)[1] == 15


def test_no_verdict_if_every_step_has_another_size():
    machine = Machine(12, 6)
    launches = LaunchBound(machine.mark, lambda: machine.now / 1000)
    for _ in range(20):
        machine.step(launches, usual=False)
        machine.wait()
    assert launches.verdict() is None


def test_a_disturbed_step_does_not_count():
    """A pause makes the host, or the GPU, look slow."""
    machine = Machine(12, 45)
    launches = LaunchBound(machine.mark, lambda: machine.now / 1000)
    for number in range(TIMED + 1):
        machine.step(launches, usual=number > 0, host=100.0 if number == 2 else None)
        machine.wait()
    assert launches.verdict() is False
    assert str(launches) == "launching a step takes 12.0 of its 45.0 ms"


def test_no_event_is_read_before_the_device_has_reached_it():
    """`elapsed_time` of an event that is not over raises; until then only `query` is called."""
    machine = Machine(12, 45)
    launches = LaunchBound(machine.mark, lambda: machine.now / 1000)
    machine.step(launches, usual=False)
    machine.wait()
    machine.step(launches)
    launches.verdict()
    assert launches.host_ms == []
    machine.wait()
    launches.verdict()
    assert launches.host_ms == pytest.approx([12.0])
    assert launches.device_ms == pytest.approx([45.0])
