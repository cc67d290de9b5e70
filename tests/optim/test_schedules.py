"""Schedules: exact at their borders, in range everywhere."""

import itertools
import math

import pytest
import torch

from utils.optim.schedules import SCHEDULES, Schedule


def test_cosine_without_warmup():
    schedule = Schedule("cosine", 8)
    assert schedule.factor(0) == 1
    assert schedule.factor(4) == pytest.approx(0.5)
    assert schedule.factor(8) == pytest.approx(0)
    assert schedule.factor(2) == pytest.approx((1 + math.sqrt(0.5)) / 2)


def test_constant_is_one_everywhere():
    assert {Schedule("constant", 5).factor(step) for step in range(8)} == {1.0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_is_linear_and_ends_at_the_peak(name):
    schedule = Schedule(name, 20, warmup_steps=4)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_after_warmup_is_the_shorter_cosine():
    warmed, plain = Schedule("cosine", 20, 4), Schedule("cosine", 16)
    assert [warmed.factor(step + 4) for step in range(17)] == [plain.factor(s) for s in range(17)]


def test_warmup_longer_than_the_run_is_cut_off_by_its_end():
    schedule = Schedule("cosine", 5, warmup_steps=10)
    assert [schedule.factor(step) for step in range(5)] == [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_run_of_one_step_takes_the_whole_rate(name, warmup):
    assert Schedule(name, 1, warmup).factor(0) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_factor_stays_between_0_and_1_and_falls_after_the_warmup(name):
    for total, warmup in itertools.product((1, 2, 3, 7, 100), (0, 1, 2, 7, 150)):
        schedule = Schedule(name, total, warmup)
        factors = [schedule.factor(step) for step in range(max(total, warmup) + 5)]
        assert all(0 <= factor <= 1 for factor in factors)
        assert all(factor > 0 for factor in factors[:total])  # no step of the run is idle
        assert factors[:warmup] == sorted(factors[:warmup])
        assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


def test_apply_scales_every_group_by_its_own_peak():
    groups = [{"params": [torch.zeros(1)], "lr": 9.0, "base_lr": peak} for peak in (0.5, 2.0)]
    optimizer = torch.optim.SGD(groups)
    Schedule("cosine", 8).apply(optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 1.0])
    Schedule("constant", 8).apply(optimizer, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_unknown_name():
    with pytest.raises(ValueError, match="cosine"):
        Schedule("linear", 10)
