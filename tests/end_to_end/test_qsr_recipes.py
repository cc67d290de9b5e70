"""The recipes of the paper of the Quadratic Synchronization Rule: their settings, and how often
their workers average. (tests/end_to_end/test_docs.py sees that each can be read.)"""

from pathlib import Path

import pytest

import resnet50_test
import vit_test
from utils.data.steps import Steps
from utils.local.rules import simulate
from utils.local.workers import Workers
from utils.runs.local import rule_of
from utils.runs.optimization import schedule_maker
from utils.settings.config import parse

RECIPES = Path(__file__).parents[2] / "recipes"
# What local steps differ by from the recipe without them.
LOCAL = {"strategy", "local_workers", "sync_base", "qsr_alpha"}
PAIRS = {
    ("vit_b16_adamw", "vit_b16_local"): LOCAL | {"weight_decay", "clip"},
    ("resnet152_sgd", "resnet152_local"): LOCAL | {"bn_batches"},
    ("resnet152_step_sgd", "resnet152_step_local"): LOCAL | {"bn_batches"},
    ("resnet152_sgd", "resnet152_step_sgd"): {"epochs", "sched", "milestones", "min_lr"},
}


def settings_of(name: str, *flags: str):
    entry = vit_test if name.startswith("vit") else resnet50_test
    path = RECIPES / f"qsr_{name}.yaml"
    return parse(entry.Settings, ["--config", str(path), *flags], "")[0]


def rounds_of(settings):
    """The rounds of a run over ImageNet's 1,281,167 pictures, in parts for 16 workers."""
    epoch = Steps(
        1_281_167, batch_size=settings.batch_size, step_size=settings.global_batch, shuffle=True,
        mixing=None, drop_last=settings.drop_last,
    ).steps_per_epoch  # fmt: skip
    total = settings.epochs * epoch
    schedule = schedule_maker(settings, settings.lr, epoch)(total)
    rule = rule_of(settings, schedule, settings.lr, total, epoch)
    return simulate(rule, lambda step: settings.lr * schedule.factor(step))


@pytest.mark.parametrize("names", PAIRS, ids=" ".join)
def test_recipes_differ_as_they_say(names):
    one, other = (vars(settings_of(name)) for name in names)
    assert {key for key in one if one[key] != other[key]} == PAIRS[names] | {"config"}


@pytest.mark.parametrize(
    ("name", "flags", "steps", "averagings"),
    [
        ("vit_b16_local", [], 93_600, 9_711),
        ("vit_b16_local", ["--sync_base", "8"], 93_600, 6_461),
        ("resnet152_local", [], 62_400, 24_792),
        pytest.param(
            "resnet152_local", ["--sync_base", "4", "--qsr_alpha", "0.25"], 62_400, 12_539,
            marks=pytest.mark.slow,
        ),
        ("resnet152_step_local", [], 28_080, 6_251),
    ],
)  # fmt: skip
def test_rounds_are_those_of_the_paper(name, flags, steps, averagings):
    """That with steps has rounds of 2, 6, 625 and all steps, at a tenth of the rate before."""
    rounds = rounds_of(settings_of(name, *flags))
    assert (sum(rounds), len(rounds)) == (steps, averagings)
    if name == "resnet152_step_local":
        assert set(rounds) == {2, 6, 625, rounds[-1]}


@pytest.mark.parametrize("name", ["vit_b16_local", "resnet152_local", "resnet152_step_local"])
@pytest.mark.parametrize("processes", [1, 4, 8, 16])
def test_all_workers_together_take_the_whole_step(name, processes):
    settings = settings_of(name)
    assert settings.global_batch == 4096 and settings.local_workers == 16
    assert Workers.divide(16, 0, processes).counts == (16 // processes,) * processes
    assert settings.global_batch % (settings.batch_size * settings.local_workers) == 0
