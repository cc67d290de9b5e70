"""Losses, augmentations, optimizers and schedules as FILE.py:NAME (docs/extending.md)."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quick_runs import quick

import fewhours
from utils.augment.own import OwnAugmentation
from utils.optim.schedules import build_schedule
from utils.training.class_balance import OwnLoss
from utils.training.objective import mixed_cross_entropy

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"
WRONG = """
import math, torch
def fails(*arguments, **more):
    raise RuntimeError("no")

def two(*arguments, **more):
    return 2.0

def smaller(pictures, generator):
    return pictures[:, :, 1:]

mean = torch.nn.CrossEntropyLoss()

def minus(fraction):
    return -1

def cosine(fraction):
    return 0.5 * (1 + math.cos(math.pi * fraction))
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(re.search(r"```\n(# mine.py\n.+?)```", PAGE.read_text(), re.S)[1])
    Path("wrong.py").write_text(WRONG)
    return tmp_path


def test_the_page_trains_and_resumes_to_the_bit(here, capsys):
    flags = dict(re.findall(r"--(\w+) (mine\.py:\w+|0\.002)", PAGE.read_text()))
    assert flags.keys() == {"loss", "augment", "optimizer", "lr", "sched"}
    flags |= {"width": 4, "batch_size": 32, "max_steps": 3}
    flags |= {"device": "cpu", "baseline": False, "report": False, "mixup": 0.2, "threads": 1}
    whole = fewhours.train("shapes", output="whole", save_every=2, **flags)
    with open("mine.py", "a") as file:
        file.write("# a remark\n")
    capsys.readouterr()
    rest = fewhours.train(resume="whole/checkpoints/step-00000002", output="rest")
    assert rest.summary["steps"] == 3 and rest.summary["optimizer"] == "mine.py:nadam"
    weights = [
        (run.folder / "checkpoints/step-00000003/model.safetensors").read_bytes()
        for run in (whole, rest)
    ]
    assert weights[0] == weights[1]
    said = capsys.readouterr().out
    for name in ("poly_loss", "jitter", "nadam", "square_root"):
        assert f"note: the file of mine.py:{name} has changed since the run was saved" in said


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"loss": "wrong.py:fails"},
            "--loss wrong.py:fails failed in line 4: RuntimeError: no; it",
        ),
        ({"loss": "wrong.py:mean"}, "answers two samples with (); it returns the loss of each"),
        ({"loss": "wrong.py:two"}, "answers two samples with float"),
        ({"augment": "wrong.py:fails"}, "--augment wrong.py:fails failed in line 4"),
        ({"augment": "wrong.py:smaller"}, "makes ((2, 3, 31, 32), torch.uint8) of ((2, 3, 32, 32)"),
        ({"optimizer": "wrong.py:two", "lr": 1}, "returns a float, not a torch.optim.Optimizer"),
        ({"optimizer": "wrong.py:fails", "lr": 1}, "weight_decay=...) failed in line 4"),
        ({"optimizer": "wrong.py:two"}, "has no usual learning rate: give --lr"),
        ({"optimizer": "adamm"}, "or FILE.py:NAME, did you mean adamw?"),
        ({"sched": "wrong.py:minus"}, "--sched wrong.py:minus(0) is -1, not a factor of --lr"),
        ({"sched": "wrong.py:fails"}, "--sched wrong.py:fails(0) failed in line 4"),
        ({"sched": "wrong.py:none"}, "wrong.py has no function named none; it has fails, two"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(flags, told, here):
    with pytest.raises(fewhours.UserError, match=re.escape(told)):
        fewhours.train("shapes", width=4, max_steps=1, device="cpu", output="run", **flags)
    assert not Path("run").exists()


def test_cross_entropy_as_an_own_loss_is_that_of_mixed_samples():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 4, generator=generator)
    targets, partners = torch.randint(0, 4, (2, 9), generator=generator)
    lam = torch.rand(9, generator=generator)
    own = OwnLoss(function=lambda *pair: F.cross_entropy(*pair, reduction="none"))
    expected = mixed_cross_entropy(logits, targets, partners, lam)
    torch.testing.assert_close(own.losses(logits, targets, partners, lam), expected)


def test_a_cosine_as_an_own_schedule_is_the_cosine(here):
    made = [
        build_schedule(name, lr=0.1, total_steps=20, steps_per_epoch=5, warmup_steps=3)
        for name in ("cosine", "wrong.py:cosine")
    ]
    for step in range(22):
        assert made[0].factor(step) == pytest.approx(made[1].factor(step), abs=1e-12)


def test_a_module_sees_each_picture_with_its_own_seed(here):
    own = OwnAugmentation("mine.py:jitter", (8, 8, 3))
    pictures = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8)
    plan, state = own.draw(6, np.random.default_rng(0)), torch.get_rng_state()
    whole = own.apply(pictures, plan)
    parts = [own.apply(pictures[part], plan[part]) for part in (slice(0, 2), slice(2, 6))]
    assert torch.equal(whole, torch.cat(parts)) and torch.equal(state, torch.get_rng_state())
    assert not torch.equal(whole, pictures)


def test_a_function_gets_a_generator_that_its_batch_decides(here):
    own = OwnAugmentation("mine.py:negatives", (8, 8, 3))
    pictures, plan = torch.zeros(50, 8, 8, 3, dtype=torch.uint8), np.arange(50)
    one, again, other = (own.apply(pictures, plan + shift) for shift in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert own.apply(pictures[:0], plan[:0]).shape == (0, 8, 8, 3)  # a filler
