"""Schedules: exact at their ends, in range everywhere."""

import itertools
import math

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from utils.optim.schedules import LENGTH_INDEPENDENT, SCHEDULES, Plateau, Schedule, build_schedule

# onecycle has its own warm-up, plateau follows the loss.
WARMED = [name for name in SCHEDULES if name not in ("onecycle", "plateau")]
PATIENCES = (0, 1, 3)


def test_cosine_without_warmup():
    schedule = Schedule("cosine", 8)
    assert schedule.factor(0) == 1
    assert schedule.factor(4) == pytest.approx(0.5)
    assert schedule.factor(8) == pytest.approx(0)
    assert schedule.factor(2) == pytest.approx((1 + math.sqrt(0.5)) / 2)


def test_constant_is_one_everywhere():
    assert {Schedule("constant", 5).factor(step) for step in range(8)} == {1.0}


@pytest.mark.parametrize("name", WARMED)
def test_warmup_is_linear_and_ends_at_the_peak(name):
    schedule = Schedule(name, 20, warmup_steps=4, step_size=10, milestones=(10,))
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_after_warmup_is_the_shorter_cosine():
    warmed, plain = Schedule("cosine", 20, 4), Schedule("cosine", 16)
    assert [warmed.factor(step + 4) for step in range(17)] == [plain.factor(s) for s in range(17)]


def test_warmup_longer_than_the_run_is_cut_off_by_its_end():
    schedule = Schedule("cosine", 5, warmup_steps=10)
    assert [schedule.factor(step) for step in range(5)] == [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("name", WARMED)
def test_run_of_one_step_takes_the_whole_rate(name, warmup):
    assert Schedule(name, 1, warmup, step_size=1, milestones=(1,)).factor(0) == 1


@pytest.mark.parametrize("name", WARMED)
def test_factor_stays_between_0_and_1_and_falls_after_the_warmup(name):
    for total, warmup in itertools.product((1, 2, 3, 7, 100), (0, 1, 2, 7, 150)):
        schedule = Schedule(name, total, warmup, step_size=3, milestones=(2, 5))
        factors = [schedule.factor(step) for step in range(max(total, warmup) + 5)]
        assert all(0 <= factor <= 1 for factor in factors)
        assert all(factor > 0 for factor in factors[:total])  # no step of the run has the rate 0
        assert factors[:warmup] == sorted(factors[:warmup])
        assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


def factors_of(scheduler, optimizer, steps) -> list[float]:
    """The factors of a scheduler of PyTorch, by an optimizer with the base rate 1."""
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def reference_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (Schedule("step", 30, gamma=0.3, step_size=7), lambda o: StepLR(o, 7, 0.3)),
        (
            Schedule("multistep", 30, gamma=0.5, milestones=(3, 4, 20)),
            lambda o: MultiStepLR(o, [3, 4, 20], 0.5),
        ),
        (
            Schedule("linear", 30, min_factor=0.1),
            lambda o: LinearLR(o, 1.0, 0.1, total_iters=30),
        ),
        (
            Schedule("cosine", 30, min_factor=0.1),
            lambda o: CosineAnnealingLR(o, 30, eta_min=0.1),
        ),
        (Schedule("onecycle", 31), lambda o: OneCycleLR(o, 1.0, 31, cycle_momentum=False)),
    ],
)
def test_equal_to_pytorch(ours, theirs):
    optimizer = reference_optimizer()
    scheduler = theirs(optimizer)
    expected = factors_of(scheduler, optimizer, 30)
    assert [ours.factor(step) for step in range(30)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("patience", PATIENCES)
def test_plateau_is_pytorchs(patience):
    losses = [3.0, 2.0, 2.0, 2.5, 1.9999, 1.5, 1.6, 1.7, 1.6, 1.6, 1.6, 1.4, 1.4, 1.4, 1.4, 1.4]
    optimizer = reference_optimizer()
    theirs = ReduceLROnPlateau(optimizer, factor=0.3, patience=patience, min_lr=0.05)
    ours = Plateau("plateau", 0, gamma=0.3, patience=patience, min_factor=0.05)
    for step, loss in enumerate(losses):
        theirs.step(loss)
        before = ours.reduced
        fell = ours.observe(loss)
        assert ours.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        assert fell == (ours.reduced < before)
        again = Plateau("plateau", 0, gamma=0.3, patience=patience, min_factor=0.05)
        again.load_state_dict(ours.state_dict())
        assert again == ours  # the same after resuming here
        ours = again
    assert patience > 1 or ours.reduced < 1


def test_plateau_before_the_first_evaluation():
    plateau = Plateau("plateau", 0, warmup_steps=2)
    again = Plateau("plateau", 0, warmup_steps=2)
    again.load_state_dict(plateau.state_dict())
    assert again == plateau and [again.factor(step) for step in range(4)] == [0.5, 1, 1, 1]


def test_onecycle_of_few_steps():
    for total in range(1, 12):
        factors = [Schedule("onecycle", total).factor(step) for step in range(total + 3)]
        assert all(0 < factor <= 1 for factor in factors)
        assert factors[-1] == factors[-3]  # beyond its end: the lowest rate


def test_lengths_may_be_given_in_epochs():
    build = lambda name, **given: build_schedule(  # noqa: E731
        name, lr=0.2, total_steps=300, steps_per_epoch=10, **given
    )
    assert build("step").step_size == 100
    assert build("step", step_epochs=2.5).step_size == 25
    assert build("multistep").milestones == (150, 225)
    assert build("multistep", milestones=[1, 2.5]).milestones == (10, 25)
    assert build("cosine", min_lr=0.05).factor(300) == pytest.approx(0.25)
    assert build("plateau", min_lr=0.05, plateau_patience=2).patience == 2


def test_apply_scales_every_group_by_its_own_peak():
    groups = [{"params": [torch.zeros(1)], "lr": 9.0, "base_lr": peak} for peak in (0.5, 2.0)]
    optimizer = torch.optim.SGD(groups)
    Schedule("cosine", 8).apply(optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 1.0])
    Schedule("constant", 8).apply(optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_length_independent_are_the_schedules_that_the_number_of_steps_does_not_change(name):
    short, long = (
        build_schedule(name, lr=1.0, total_steps=total, steps_per_epoch=1) for total in (60, 90)
    )
    unchanged = [short.factor(step) for step in range(60)] == [long.factor(s) for s in range(60)]
    assert unchanged == (name in LENGTH_INDEPENDENT)


@pytest.mark.parametrize(
    "name, fixed", [("step", {"step_epochs": 7}), ("multistep", {"milestones": [9]})]
)
def test_where_the_rate_falls_can_be_fixed(name, fixed):
    short, long = (
        build_schedule(name, lr=1.0, total_steps=total, steps_per_epoch=1, **fixed)
        for total in (60, 90)
    )
    assert [short.factor(step) for step in range(60)] == [long.factor(s) for s in range(60)]


def test_a_rate_for_each_epoch():
    """The run of recipes/vit_b32_imagenet.yaml: (e + 1) / 151 in the first 150 epochs, then
    (300 - e) / 150, over 39 steps each."""
    steps = 39
    schedule = build_schedule(
        "linear", lr=0.018, total_steps=300 * steps, steps_per_epoch=steps,
        warmup_steps=150 * steps, per_epoch=True,
    )  # fmt: skip
    for epoch in range(300):
        expected = (epoch + 1) / 151 if epoch < 150 else (300 - epoch) / 150
        for step in (0, 1, steps - 1):
            assert schedule.factor(epoch * steps + step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", WARMED)
def test_the_rate_of_an_epoch_is_that_of_its_first_step(name):
    each, once = (
        build_schedule(name, lr=1.0, total_steps=60, steps_per_epoch=6, per_epoch=per_epoch)
        for per_epoch in (False, True)
    )
    assert [once.factor(step) for step in range(60)] == [
        each.factor(step // 6 * 6) for step in range(60)
    ]


def test_the_warm_up_starts_at_a_given_rate():
    given = {"lr": 0.4, "total_steps": 100, "steps_per_epoch": 10, "warmup_steps": 20}
    schedule = build_schedule("constant", **given, warmup_lr=0.1)
    assert [0.4 * schedule.factor(step) for step in (0, 10, 20)] == pytest.approx([0.1, 0.25, 0.4])
    by_epoch = build_schedule("constant", **given, warmup_lr=0.1, per_epoch=True)
    assert [by_epoch.factor(step) for step in (9, 19, 20)] == pytest.approx([0.25, 0.625, 1.0])
    assert build_schedule("constant", **given, warmup_lr=0.4).factor(0) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "step", "multistep", "onecycle"])
def test_corrections_of_the_length(name):
    """The curve is continuous, ends with the last step, and is stretched alike everywhere."""
    values = {"lr": 1, "total_steps": 1000, "steps_per_epoch": 10, "warmup_steps": 20}
    before, changed = build_schedule(name, **values), build_schedule(name, **values)
    changed.corrections = [(200, 600), (400, 800)]
    places = [changed.position(step) for step in range(20, 801)]
    assert places[:181] == [before.position(step) for step in range(20, 201)]
    assert changed.position(400) == pytest.approx(600)  # half of the way from 200 to 1000
    assert changed.position(600) == pytest.approx(800)
    assert changed.position(800) == pytest.approx(1000)
    assert all(0.9 < b - a < 2.1 for a, b in itertools.pairwise(places))
    assert changed.factor(600) == pytest.approx(before.factor(800))


def test_rates_that_fall_at_given_epochs_follow_no_correction():
    fixed = {"lr": 1, "total_steps": 100, "steps_per_epoch": 10}
    for name, epochs in (("step", {"step_epochs": 3}), ("multistep", {"milestones": [3, 6]})):
        schedule = build_schedule(name, **fixed, **epochs)
        factors = [schedule.factor(step) for step in range(100)]
        schedule.corrections = [(20, 50)]
        assert [schedule.factor(step) for step in range(100)] == factors
