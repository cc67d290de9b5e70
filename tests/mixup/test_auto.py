"""--mixup auto: the strength of mixing, when it is measured, and what is held out for it."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy import CPU, HELD_OUT, history, loader, make_trainer, network

from utils.data.batch import random_generator
from utils.data.loader import HoldOut
from utils.data.texts.equal_tokens import EqualTokensLoader
from utils.data.texts.loader import TextLoader
from utils.mixup.auto import (
    COST,
    FALLBACK_STRENGTH,
    FORWARD,
    INTERVAL,
    MEASURE_UNTIL,
    MIN_STRENGTH,
    AutoStrength,
    Reading,
    final_gap,
    held_out_samples,
    strength_at,
)
from utils.mixup.mixing import Mixing
from utils.reporting.metrics import to_json
from utils.tasks.mixing import auto_split


def planned(held_out=250, total_steps=1000, steps_per_epoch=10, step_size=10_000) -> AutoStrength:
    strength = AutoStrength(held_out)
    strength.schedule_measurements(total_steps, steps_per_epoch, step_size)
    return strength


# ---- the strength -------------------------------------------------------------------------------


def test_the_strength_is_the_square_of_the_final_gap():
    assert strength_at(0.5) == 0.25 and strength_at(0.31) == 0.1 and strength_at(1.0) == 1.0
    assert strength_at(5.0) == 1.0 and strength_at(-5.0) == 0.0
    assert strength_at(0.23) == MIN_STRENGTH
    assert strength_at(0.2) == 0.0, "hardly any mixing is none"


def test_the_final_gap_is_on_the_line_through_the_origin_by_least_squares():
    steps = np.array([50, 100, 150, 200])
    gaps = np.array([0.0, 0.07, 0.05, 0.16])
    slope = np.linalg.lstsq(steps[:, None].astype(float), gaps, rcond=None)[0][0]
    found = final_gap(list(zip(steps.tolist(), gaps.tolist(), strict=True)), 1000)
    assert found == pytest.approx(1000 * slope, rel=1e-12)


def test_a_gap_that_grows_in_proportion_is_foreseen_at_once():
    for measured in ([(50, 0.03)], [(50, 0.03), (100, 0.06), (400, 0.24)]):
        assert final_gap(measured, 1000) == pytest.approx(0.6)


def test_nothing_measured_is_no_gap():
    assert final_gap([], 1000) == final_gap([(50, math.nan)], 1000) == 0.0


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_a_gap_that_is_not_finite_changes_nothing(gap):
    strength, plain = planned(), planned()
    strength.observe(50, 0.03)
    assert strength.observe(100, gap).strength == strength.current == 0.36
    plain.observe(50, 0.03)
    assert strength.observe(150, 0.07).strength == plain.observe(150, 0.07).strength


def test_a_gap_that_is_not_finite_survives_a_checkpoint():
    """JSON has no NaN."""
    auto, resumed = planned(), planned()
    auto.observe(10, math.nan)
    resumed.load_trace(json.loads(to_json(auto.saved_trace())))
    assert [each.observe(20, 0.3).strength for each in (auto, resumed)] == [auto.current] * 2


def test_rounding_errors_of_the_losses_do_not_reach_the_strength():
    for gap in (0.0, 0.1, 0.3137, 0.7):
        assert strength_at(gap) == strength_at(gap + 1e-7)


def test_it_settles_where_the_gap_agrees_with_it():
    """A network whose gap grows the slower the stronger the mixing is, in closed form."""
    strength, gap = planned(total_steps=100_000), 0.0
    for step in range(1, 40_001):
        gap += (0.8 - 0.5 * strength.current) / 100_000
        if step % 100 == 0:
            strength.observe(step, gap)
    # a = (0.8 - 0.5 a)^2
    assert strength.current == pytest.approx(1.8 / 0.5 - math.sqrt(3.6**2 - 2.56), abs=0.02)


def test_a_measurement_takes_effect_a_step_later_than_it_could():
    strength = planned()
    assert strength.observe(100, 0.05) == Reading(100, 0.05, 0.25)
    assert [strength(step) for step in (0, 99, 100)] == [0.0] * 3
    assert strength(101) == strength.current == 0.25
    strength.observe(200, 0.14)  # (100 * 0.05 + 200 * 0.14) / (100^2 + 200^2) = 0.66 / 1000
    assert strength(200) == 0.25 and strength(201) == strength(999) == strength.current == 0.44


def test_a_run_that_is_made_longer_has_a_larger_final_gap():
    strength = planned(total_steps=1000)
    strength.observe(100, 0.02)
    strength.schedule_measurements(4000, 10, 10_000)
    assert strength.current == 0.0, "until it is measured again"
    assert strength.observe(200, 0.04).strength == 0.64


def test_before_the_plan_it_is_as_strong_as_it_can_become():
    assert AutoStrength(250)(0) == 1


# ---- when it is measured ------------------------------------------------------------------------


def due_steps(strength, total=1000) -> list[int]:
    found = []
    for step in range(1, total + 1):
        if strength.is_due(step):
            found.append(step)
            strength.observe(step, 0.1)
    return found


def test_it_is_measured_regularly_in_the_first_two_fifths():
    found = due_steps(planned())
    assert found == list(range(50, 401, 50))
    assert found[0] == INTERVAL * 1000 and found[-1] == 1000 * MEASURE_UNTIL


def test_measuring_costs_a_small_part_of_the_passes():
    strength = planned(held_out=250, step_size=64)
    measured = len(due_steps(strength))
    assert 0 < measured * 2 * 250 * FORWARD <= COST * MEASURE_UNTIL * 1000 * 64
    assert COST * MEASURE_UNTIL < 0.01


def test_a_step_is_measured_once():
    strength = planned()
    strength.observe(50, 0.1)
    assert not strength.is_due(50) and strength.is_due(100)


def test_nothing_is_measured_where_nothing_is_held_out():
    strength = planned(held_out=0)
    assert due_steps(strength) == [] and strength(500) == strength.current == FALLBACK_STRENGTH


@pytest.mark.parametrize(("epochs", "joins"), [(2, 1), (3, 1), (4, 2), (10, 4), (100, 40)])
def test_all_samples_train_in_the_last_three_fifths(epochs, joins):
    strength = AutoStrength(250)
    assert strength.schedule_measurements(10 * epochs, 10, 10_000) == joins
    last = due_steps(strength, 10 * epochs)[-1]
    assert last <= 10 * joins and last <= 10 * epochs * MEASURE_UNTIL


def test_a_run_that_is_too_short_to_measure_holds_nothing_out():
    strength = AutoStrength(250)
    assert strength.schedule_measurements(6 * 20, 20, 128) == 0 and not strength.measures
    assert due_steps(strength, 120) == [] and strength(100) == 0
    assert strength.schedule_measurements(20, 20, 128) == 0, "one epoch"
    assert strength.schedule_measurements(100 * 20, 20, 128) == 40 and strength.measures


def test_nothing_is_held_out_any_more_where_nothing_is_mixed_any_more():
    strength = AutoStrength(250)
    assert strength.schedule_measurements(500, 10, 10_000, off_epoch=10) == 10
    assert due_steps(strength, 500)[-1] == 100
    assert strength.schedule_measurements(500, 10, 10_000, off_epoch=45) == 20


@pytest.mark.parametrize(
    ("samples", "held_out"),
    [(499, 0), (500, 50), (1_000, 100), (2_500, 250), (10_000, 250), (50_000, 1_000), (9, 0)],
)
def test_how_many_samples_are_held_out(samples, held_out):
    assert held_out_samples(samples) == held_out


# ---- what is held out ---------------------------------------------------------------------------


def split_of(counts: list[int]):
    labels = np.repeat(np.arange(len(counts)), counts)
    split = auto_split(SimpleNamespace(mixup="auto", seed=0), labels)
    return labels, split


def test_both_parts_have_the_same_classes():
    labels, split = split_of([900, 90, 12, *[20] * 20])
    parts = [np.bincount(labels[part], minlength=23) for part in (split.held_out, split.trained)]
    assert parts[0].sum() == parts[1].sum() == held_out_samples(len(labels))
    assert abs(parts[0] - parts[1]).max() <= 1
    assert not set(split.held_out) & set(split.trained)


def test_no_class_is_held_out_whole():
    labels, split = split_of([500, 1, 1, *[2] * 30])
    left = np.delete(np.arange(len(labels)), split.held_out)
    assert set(labels[left]) == set(labels)


def test_a_set_of_hardly_more_samples_than_classes_holds_nothing_out():
    _, split = split_of([2] * 500)
    assert split.strength.held_out == 100
    _, split = split_of([1] * 900)
    assert split.strength.held_out == len(split.held_out) == 0


def text_loader(**options) -> TextLoader:
    lengths = np.random.default_rng(0).integers(2, 12, 23)
    offsets = np.append(0, np.cumsum(lengths))
    loader_class = EqualTokensLoader if "batch_tokens" in options else TextLoader
    return loader_class(
        np.ones(offsets[-1], np.uint16), offsets, np.arange(23) % 3, device=CPU, max_len=12,
        shuffle=True, batch_size=4, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options"),
    [(loader, {}), (text_loader, {}), (text_loader, {"batch_tokens": 30})],
    ids=["pictures", "texts", "tokens"],
)
def test_held_out_samples_are_replaced_until_they_join(make, options):
    hold_out = HoldOut(HELD_OUT, 23)
    hold_out.release_from(2)
    data, plain = make(hold_out=hold_out, **options), make(**options)
    assert data.steps_per_epoch == plain.steps_per_epoch
    for epoch in range(4):
        order = data.order(epoch)
        assert len(order) == len(plain.order(epoch)) == 23
        counts = np.bincount(order, minlength=23)
        if epoch < 2:
            others = np.delete(counts, HELD_OUT)
            assert not counts[HELD_OUT].any() and set(others) == {1, 2}
            assert (others == 2).sum() == len(HELD_OUT)
        else:
            assert (order == plain.order(epoch)).all()


def test_other_samples_take_their_places_in_every_epoch():
    hold_out = HoldOut(HELD_OUT, 23)
    order = np.arange(23)
    drawn = {
        tuple(hold_out.replace(order, 0, np.random.default_rng(seed))[HELD_OUT])
        for seed in range(20)
    }
    assert len(drawn) == 20
    assert (order == np.arange(23)).all(), "the order that it was given"


def test_a_text_loader_of_some_rows_has_these():
    rows = np.array([3, 7, 8])
    data, whole = text_loader(rows=rows), text_loader()
    assert (data.lengths == whole.lengths[rows]).all() and (data.starts == whole.starts[rows]).all()
    assert (data.labels == whole.labels[rows]).all()


# ---- mixing and training ------------------------------------------------------------------------


def draws(mixing, step):
    return mixing.draw(8, 0, step, random_generator(0, 2, 0, step))


@pytest.mark.parametrize("cutmix", [0.0, 1.0])
def test_a_strength_is_a_factor_of_alpha(cutmix):
    half = Mixing(
        alpha=0.8, cutmix_alpha=cutmix, block=8, height=8, width=8, strength=lambda _: 0.5
    )
    plain = Mixing(alpha=0.4, cutmix_alpha=cutmix / 2, block=8, height=8, width=8)
    for step in range(8):
        for ours, theirs in zip(draws(half, step), draws(plain, step), strict=True):
            assert np.array_equal(ours, theirs)


def test_no_strength_is_no_mixing():
    mixing = Mixing(alpha=1.0, block=8, strength=lambda step: float(step >= 3))
    assert [draws(mixing, step) is None for step in range(5)] == [True] * 3 + [False] * 2


def test_the_strength_of_a_run_is_what_its_records_say(tmp_path):
    trainer = make_trainer(tmp_path, epochs=5, auto=True)
    control, visited = trainer.mixing_control, []
    trainer.fit()
    records = [r for r in history(tmp_path) if r["split"] == "mixing"]
    strength = control.strength
    assert len(records) == len(strength.trace) >= 3
    assert [(r["step"], r["gap"], r["strength"]) for r in records] == strength.trace
    measured = [(record["step"], record["gap"]) for record in records]
    for count, record in enumerate(records, start=1):
        assert record["strength"] == strength_at(final_gap(measured[:count], strength.total_steps))
    for epoch in range(5):
        visited.append(set(trainer.loader.order(epoch)) & set(HELD_OUT))
    assert control.release_epoch == 2 and visited == [set()] * 2 + [set(HELD_OUT)] * 3


def test_measuring_leaves_no_trace_in_model_and_random_numbers(tmp_path):
    trainer = make_trainer(tmp_path, auto=True, model=network(dropout=0.5), freeze_until=2)
    trainer.prepare(0)
    modes = [module.training for module in trainer.steps.model.modules()]
    assert len(set(modes)) == 2
    before = {k: t.clone() for k, t in trainer.steps.model.state_dict().items()}
    states = torch.get_rng_state()
    trainer.progress.step = trainer.mixing_control.strength.interval
    trainer.control_mixing(0)
    assert len(trainer.mixing_control.strength.trace) == 1
    assert modes == [module.training for module in trainer.steps.model.modules()]
    assert torch.equal(states, torch.get_rng_state())
    for name, tensor in trainer.steps.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_gap_is_that_of_the_two_losses_in_float64(tmp_path):
    trainer = make_trainer(tmp_path, auto=True)
    model = trainer.steps.model
    losses = []
    for rows in (HELD_OUT - 1, HELD_OUT):
        images = loader(4, augment=False, shuffle=False)
        inputs = torch.cat([batch.inputs for batch in images.epoch()]).double()[rows]
        targets = images.labels[rows]
        logits = torch.func.functional_call(
            model.eval(), {k: t.double() for k, t in model.state_dict().items()}, (inputs,)
        )
        losses.append(torch.nn.functional.cross_entropy(logits, targets).item())
    assert trainer.mixing_control.measure() == pytest.approx(1 - losses[0] / losses[1], abs=1e-5)


def test_a_longer_run_does_not_hold_out_what_it_has_trained_on(tmp_path):
    short = make_trainer(tmp_path, epochs=5, auto=True)
    short.fit()
    longer = make_trainer(tmp_path, epochs=20, auto=True)
    longer.restore(longer.saver.store.load())
    readings = len(short.mixing_control.strength.trace)
    assert longer.mixing_control.release_epoch == 2
    longer.fit()
    assert len(longer.mixing_control.strength.trace) == readings
    assert set(longer.loader.order(6)) >= set(HELD_OUT)


def test_a_run_that_is_made_longer_early_goes_on_measuring(tmp_path):
    make_trainer(tmp_path, epochs=5, save_steps=5, auto=True).fit()
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    for folder in saved[1:]:
        shutil.rmtree(folder)
    longer = make_trainer(tmp_path, epochs=20, auto=True)
    longer.restore(longer.saver.store.load())
    before = len(longer.mixing_control.strength.trace)
    longer.fit()
    assert longer.mixing_control.release_epoch == 8
    assert len(longer.mixing_control.strength.trace) > before
