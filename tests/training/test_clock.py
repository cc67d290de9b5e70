"""Speed counts only the time spent training, from one log line to the next."""

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
