"""When workers average, against brute force and the paper's runs."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.local.rules import SyncRule, cut, default_alpha, power_length, simulate
from utils.optim.schedules import Schedule
from utils.settings.local import RULE_FLAGS

TICK = 1000  # learning rates and alpha of the tests are whole multiples of 1 / TICK


def brute_force(rule: SyncRule, ticks: list[int], alpha_ticks: int) -> list[int]:
    """The lengths of all rounds, walking through the steps one by one, in exact arithmetic.

    Args:
        ticks: the learning rate of each step, in 1 / TICK.
    """
    lengths, remaining = [], 0
    for step, now in enumerate(ticks):
        left = len(ticks) - step
        if remaining == 0:
            eta = max(ticks) if step < rule.warmup_steps else now
            remaining = {
                "constant": rule.base,
                "diloco": rule.base,
                "post_local": rule.base if step >= rule.switch_step else 1,
                "swap": left if step >= rule.switch_step else 1,
                "qsr": left
                if eta == 0
                else max(rule.base, math.floor(Fraction(alpha_ticks, eta) ** rule.power)),
            }[rule.name]
            remaining = max(1, min(remaining, left))
            lengths.append(0)
        lengths[-1] += 1
        remaining -= 1
    assert remaining == 0, "a run ends averaged"
    return lengths


@pytest.mark.slow
@given(
    name=st.sampled_from([*RULE_FLAGS]),
    ticks=st.lists(st.integers(0, 900), min_size=1, max_size=60).filter(any),
    alpha_ticks=st.integers(1, 900),
    base=st.integers(1, 70),
    power=st.sampled_from([1, 2, 3]),
    warmup_steps=st.integers(0, 70),
    switch_step=st.integers(0, 70),
)
@settings(max_examples=500, deadline=None)
def test_rounds_are_those_of_brute_force(name, ticks, alpha_ticks, **values):
    """Exact multiples are common among these: floats must not floor wrongly."""
    rule = SyncRule(name, len(ticks), alpha=alpha_ticks / TICK, peak_lr=max(ticks) / TICK, **values)
    lengths = simulate(rule, lambda step: ticks[step] / TICK)
    expected = brute_force(rule, ticks, alpha_ticks)
    assert lengths == expected


@given(
    times=st.integers(1, 40), ticks=st.integers(1, 5000), unit=st.integers(0, 8),
    power=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_whole_ratios_are_not_floored_to_less(times, ticks, unit, power):
    lr, alpha = ticks / 10**unit, times * ticks / 10**unit
    assert power_length(lr, 10**6, alpha=alpha, base=1, power=power) == times**power


def test_a_ratio_that_floats_floor_wrongly():
    assert math.floor((0.6 / 0.2) ** 2) == 8
    assert power_length(0.2, 100, alpha=0.6, base=1) == 9


@pytest.mark.parametrize("lr", [0.0, 5e-324, 1e-200])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_learning_rate_of_nothing_takes_all_steps_that_are_left(lr, power):
    assert power_length(lr, 1000, alpha=0.01, base=4, power=power) == 1000


def test_steps_beyond_the_run_are_rounds_of_one():
    assert power_length(0.1, 0, alpha=1.0, base=4) == power_length(0.0, -3, alpha=1.0, base=4) == 1
    assert [cut(4, left) for left in (-1, 0, 1, 3, 4, 5)] == [1, 1, 1, 3, 4, 4]


def test_the_warm_up_has_the_length_of_the_peak():
    rule = SyncRule("qsr", 100, alpha=0.3, peak_lr=0.1, warmup_steps=10)
    assert [rule.round_length(step, 0.01) for step in (0, 9)] == [9, 9]
    assert rule.round_length(10, 0.05) == 36
    assert rule.round_length(10, 0.01) == 90  # all that is left


@pytest.mark.parametrize(
    ("schedule", "steps", "warmup", "peak", "base", "alpha", "rounds", "percent"),
    [
        ("cosine", 93_600, 10_000, 0.008, 4, 0.0175, 9_711, 10.4),  # ViT-B, AdamW, 300 epochs
        ("cosine", 93_600, 10_000, 0.008, 8, 0.0175, None, 6.9),
        ("linear", 93_600, 10_000, 0.008, 4, 0.0175, None, 9.3),
        ("linear", 93_600, 10_000, 0.008, 8, 0.0175, None, 6.9),
        ("cosine", 62_400, 1_560, 0.8, 2, 0.2, None, 39.7),  # ResNet-152, SGD, 200 epochs
        ("cosine", 62_400, 1_560, 0.8, 4, 0.25, None, 20.1),
    ],
)
def test_the_runs_of_the_paper(schedule, steps, warmup, peak, base, alpha, rounds, percent):
    rule = SyncRule("qsr", steps, base, alpha, peak_lr=peak, warmup_steps=warmup)
    factor = Schedule(schedule, steps, warmup).factor
    simulated = simulate(rule, lambda step: peak * factor(step))
    assert rounds in (None, len(simulated))
    assert round(100 * len(simulated) / steps, 1) == percent
    assert sum(simulated) == steps


def test_the_default_of_alpha():
    """Close to the paper's values; and H does not depend on the scale of the learning rate."""
    assert default_alpha(0.008, 4, adaptive=True) == pytest.approx(0.0175, rel=0.01)
    assert default_alpha(0.8, 2, adaptive=False) == pytest.approx(0.2, rel=0.04)
    assert default_alpha(0.8, 4, adaptive=False) == pytest.approx(0.25, rel=0.1)
    for power, length in ((1, 44), (2, 484), (3, 5324)):  # 4 * 11 ** power
        for peak in (0.001, 0.03, 2.0):
            alpha = default_alpha(peak, 4, adaptive=True, power=power)
            assert power_length(peak / 10, 10**6, alpha=alpha, base=4, power=power) == length


def test_rounds_that_begin_in_the_warm_up_can_have_a_length_of_their_own():
    rule = SyncRule("qsr", 20, base=4, alpha=0.1, peak_lr=0.1, warmup_steps=5, init=2)
    assert [rule.round_length(step, 0.1) for step in (0, 4, 5)] == [2, 2, 4]
    assert rule.round_length(19, 0.1) == 1
