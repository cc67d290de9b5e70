"""The schedule that the settings ask for: its warm-up, and what a resumed run is told of it."""

from types import SimpleNamespace

import pytest

from resnet50_test import Settings
from utils.runs.optimization import schedule_maker, schedule_of
from utils.settings.config import parse

STEPS_PER_EPOCH = 10


def schedule(argv, steps, lines, checkpoint=None):
    settings, origin = parse(Settings, argv, "")
    build = schedule_maker(settings, 1.0, STEPS_PER_EPOCH)
    return schedule_of(
        settings, build, 1.0, steps, STEPS_PER_EPOCH, checkpoint, origin, lines.append
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--warmup_ratio", "0.1"], 4),  # of the schedule, not of the 50 epochs
        (["--warmup_epochs", "2"], 20),
        (["--warmup_steps", "7", "--warmup_ratio", "0.1"], 7),
        (["--warmup_steps", "20", "--time_budget", "1m"], 8),  # a fifth, where it is not known
        ([], 0),
    ],
)
def test_steps_of_the_warm_up(argv, expected):
    assert schedule(argv, 40, []).warmup_steps == expected


def test_onecycle_has_no_warm_up_and_no_stairs_of_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for line in (
        *("warmup_epochs: 2", "warmup_ratio: 0.5", "warmup_steps: 20"),
        "sched_per_epoch: true",
    ):
        recipe.write_text(f"{line}\n")
        made = schedule(["--config", str(recipe), "--sched", "onecycle"], 40, [])
        assert made == schedule(["--sched", "onecycle"], 40, [])


def test_a_resumed_run_is_told_that_its_warm_up_has_another_length():
    checkpoint = SimpleNamespace(run_info={"schedule_steps": 40}, step=2, state={})
    lines, constant = [], ["--sched", "constant"]
    schedule([*constant, "--warmup_ratio", "0.25"], 80, lines, checkpoint)
    assert len(lines) == 1 and "now 0.15 instead of 0.3" in lines[0]
    schedule([*constant, "--warmup_steps", "10"], 80, lines, checkpoint)
    assert len(lines) == 1


def test_a_new_rate_of_a_plateau_run_is_still_lowered():
    state = {"schedule": {"reduced": 0.01, "best": 1.0, "since_best": 0}}
    checkpoint = SimpleNamespace(run_info={"schedule_steps": 40}, step=2, state=state)
    lines, plateau = [], ["--sched", "plateau", "--val_fraction", "0.1"]
    schedule(plateau, 40, lines, checkpoint)
    assert not lines
    schedule([*plateau, "--lr", "1.0"], 40, lines, checkpoint)
    assert len(lines) == 1 and "to 0.01 of --lr so far: it is now 0.01" in lines[0]
