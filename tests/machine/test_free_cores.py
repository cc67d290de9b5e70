"""The number of threads follows the number of free cores."""

import os

import pytest
import torch
from toy import make_trainer

from utils.machine import free_cores
from utils.machine.free_cores import SECONDS, FreeCores, cpu_seconds_of_others


class Machine:
    """A fake clock, and `cores` of which others use some."""

    def __init__(self, cores: int | None, max_threads: int, monkeypatch):
        self.now = self.others_seconds = 0.0
        self.said, self.logged, self.set = [], [], []
        monkeypatch.setattr(torch, "set_num_threads", self.set.append)
        self.free_cores = FreeCores(
            max_threads, self.said.append, self.logged.append, cores,
            lambda: self.others_seconds, lambda: self.now,
        )  # fmt: skip

    def threads_with(self, busy: float, seconds: float = 2 * SECONDS) -> int:
        self.now += seconds
        self.others_seconds += busy * seconds
        self.free_cores.look()
        return self.free_cores.threads


def test_busy_cores_are_left_to_others(monkeypatch):
    machine = Machine(2, 2, monkeypatch)
    loads = [0.0, 0.2, 0.35, 0.5, 1.0, 0.35, 0.2, 2.0, 0.0]
    assert [machine.threads_with(busy) for busy in loads] == [2, 2, 2, 1, 1, 1, 2, 1, 2]
    assert machine.set == [1, 2, 1, 2]
    assert machine.said == [
        "other programs use the CPU: computing with 1 of 2 threads from here on "
        "(--threads 2 keeps all)"
    ]
    assert (
        len(machine.logged) == 3
        and "cores are free again: computing with 2 of 2" in machine.logged[0]
    )


def test_others_may_use_spare_cores(monkeypatch):
    machine = Machine(16, 8, monkeypatch)
    loads = [0.0, 8.3, 8.5, 12.0, 15.9, 40.0, 9.8, 8.2]
    assert [machine.threads_with(busy) for busy in loads] == [8, 8, 7, 4, 1, 1, 6, 8]


def test_it_measures_at_intervals(monkeypatch):
    machine = Machine(2, 2, monkeypatch)
    assert [machine.threads_with(1.0, 0.4 * SECONDS) for _ in range(4)] == [2, 2, 1, 1]


def test_cpu_seconds_of_others(tmp_path, monkeypatch):
    stat = tmp_path / "proc/stat"
    stat.parent.mkdir()
    cores = "cpu0 100 20 30 900 40 5 6 7 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\ncpu2 10 0 0 0 0 0 0\n"
    stat.write_text(f"cpu 111 21 31 901 41 6 7 8 0 0\n{cores}intr 1 2 3\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(os, "times", lambda: (0.1, 0.2, 0.3, 0.4, 99.0))
    ticks = 100 + 20 + 30 + 5 + 6 + 7 + 10  # neither idle time nor I/O wait
    assert cpu_seconds_of_others(tmp_path) == pytest.approx(ticks / os.sysconf("SC_CLK_TCK") - 1.0)


def test_a_quota_of_this_process_is_not_the_cores_that_others_leave(monkeypatch):
    """Ten of 64 cores are busy: a container that gets the time of two keeps two threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("utils.machine.cores._quotas", lambda root: [2])
    machine = Machine(None, 2, monkeypatch)
    assert machine.threads_with(10.0) == 2


def test_no_adapting_without_a_choice_or_without_statistics(monkeypatch):
    assert free_cores.follow_free_cores(print, print) is None  # tests run with one thread
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert free_cores.follow_free_cores(print, print).max_threads == 4

    def unknown(*_):
        raise OSError

    monkeypatch.setattr(free_cores, "cpu_seconds_of_others", unknown)
    assert free_cores.follow_free_cores(print, print) is None


def test_training_adapts_after_every_step(tmp_path):
    trainer, looks = make_trainer(tmp_path), []
    trainer.fit([lambda: looks.append(1)])
    assert len(looks) == trainer.plan.total_steps
