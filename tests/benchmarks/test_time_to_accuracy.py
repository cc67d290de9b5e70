"""The race of benchmarks/cpu.py and gpu.py: the time to an accuracy on real pictures."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE

from benchmarks import cpu, speed_page, time_to_accuracy
from benchmarks.budget import OutOfTime
from utils.data.images.decoded import DecodedSplit
from utils.data.images.image_data import ImageData
from utils.optim.schedules import Schedule

PLAN = dataclasses.replace(cpu.SIZES.race, width=4, batch=8, pictures=1000)


def real_pictures(train: int = 21, test: int = 6) -> ImageData:
    rng = np.random.default_rng(0)

    def split(n: int) -> DecodedSplit:
        return DecodedSplit(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) % 3)

    return ImageData(
        "few", ["a", "b", "c"], (0.5,) * 3, (0.25,) * 3, split(train), split(test), "", ""
    )


def raced(load, tmp_path: Path) -> dict:
    device = torch.device("cpu")
    return time_to_accuracy.race(load, PLAN, device, "bf16", 0, tmp_path, PATIENCE)


class InThisProcess:
    """In place of benchmarks.child.Child."""

    def __init__(self, make, environment=None):
        self.made = make()

    def call(self, name: str):
        return getattr(self.made, name)()

    def close(self) -> None:
        pass


def test_a_race_over_few_pictures_takes_whole_batches():
    course = time_to_accuracy.make_course(real_pictures(), PLAN, torch.device("cpu"))
    assert course.images.shape == (16, 32, 32, 3) and len(course.labels) == 16
    assert course.total_steps == 3 * 2
    # The schedule that `--sched onecycle` names, without a warm-up before its own rise.
    entry = Schedule("onecycle", course.total_steps)
    assert [course.schedule.factor(step) for step in range(6)] == list(map(entry.factor, range(6)))
    with pytest.raises(ValueError, match="7 pictures are less than a batch of 8"):
        time_to_accuracy.make_course(real_pictures(7), PLAN, torch.device("cpu"))


@pytest.fixture
def here(monkeypatch):
    """Races in this process, whose malloc stays as it is."""
    monkeypatch.setattr(time_to_accuracy, "Child", InThisProcess)
    monkeypatch.setattr(time_to_accuracy, "keep_freed_memory", lambda: None)


def test_a_race_that_is_cut_short_says_so(monkeypatch, tmp_path, here):
    curve = [(1.0, 30.0), (2.0, 50.0)]

    def late(*args):
        raise OutOfTime

    monkeypatch.setattr(time_to_accuracy, "usual_curve", lambda *args: curve)
    monkeypatch.setattr(time_to_accuracy, "our_curve", late)
    found = raced(real_pictures, tmp_path)
    assert found["curves"] == {"plain loop": curve, "autocast": curve}
    assert found["seconds_to_target"] == {"plain loop": 2.0, "autocast": 2.0}
    assert found["left_out"]["ours"].startswith("not done after")
    text = speed_page.race_table(found)
    assert text[0].endswith("on 16 real pictures, 3 epochs, batch 8**")
    assert text[-1].startswith("| ours | left out: not done after")


def test_a_race_without_pictures_says_so(tmp_path):
    found = raced(lambda: real_pictures(5), tmp_path)
    assert found["curves"] == {} and list(found["left_out"]) == ["real pictures"]
    assert "| left out: ValueError: 5 pictures" in speed_page.race_table(found)[-1]


@pytest.mark.slow
def test_a_small_race_has_curves_of_all(tmp_path, here):
    """test_tricks.py has a race in a process of its own."""
    found = raced(real_pictures, tmp_path)
    assert not found["left_out"]
    assert {name: len(curve) for name, curve in found["curves"].items()} == dict.fromkeys(
        ("plain loop", "autocast", "ours"), PLAN.epochs
    )
