"""Speed counts only the time spent training, from one log line to the next."""

import dataclasses
import time

import torch

from utils.training.progress import Progress
from utils.training.times import Clock


def test_a_lap_is_the_time_between_log_lines_without_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(seconds_training=7.0)
    clock = Clock(progress, torch.device("cpu"))
    now[0] += 2
    clock.end_first_step()
    assert clock.seconds_first_step == 2
    clock.samples += 30
    now[0] += 1
    clock.pause()
    now[0] += 50  # an evaluation
    clock.resume()
    now[0] += 2
    assert clock.lap() == 30 / 5 and progress.seconds_training == 7 + 5
    clock.samples += 8
    now[0] += 4
    assert clock.lap() == 8 / 4 and progress.seconds_training == 7 + 9
    assert clock.lap() == 0  # no time has passed since


def test_gpu_seconds_are_those_of_the_gpus_of_each_start(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    cpu, saved = torch.device("cpu"), {}
    for gpus, hours, in_all in ((4, 2, 8), (1, 3, 11), (0, 5, 11), (2, 0.5, 12)):
        progress = Progress()
        clock = Clock(progress, cpu, gpus=gpus)
        if saved:
            progress.load(saved)
            clock.resumed()
        now[0] += hours * 3600
        progress.seconds_total, progress.gpu_seconds = clock.seconds_total, clock.gpu_seconds
        assert progress.gpu_seconds == in_all * 3600
        saved = dataclasses.asdict(progress)
    assert progress.seconds_total == 10.5 * 3600


def test_gpu_seconds_that_an_older_version_did_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress()
    clock = Clock(progress, torch.device("cpu"), gpus=2)
    progress.load({"step": 3, "seconds_total": 50.0})
    clock.resumed()
    now[0] += 10
    assert clock.gpu_seconds == 2 * 60
