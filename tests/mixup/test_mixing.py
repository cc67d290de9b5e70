"""Mixup and CutMix against their formulas and against timm, and the random draws."""

import itertools

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup as TimmMixup

from utils.data.batch import random_generator
from utils.errors import UserError
from utils.mixup.mixing import (
    CUTMIX_FRACTION,
    Draws,
    Mixing,
    MixPlan,
    area_outside,
    cut_boxes,
    draw_partners,
    paste,
)


def pictures(n=6, height=8, width=10):
    return torch.randn(n, 3, height, width, generator=torch.Generator().manual_seed(0))


def draws_of(mixing, n=12, epoch=0, step=0, seed=0):
    return mixing.draw(n, epoch, step, random_generator(seed, 2, epoch, step))


# ---- the mathematics ----------------------------------------------------------------------------


def test_mixed_inputs_have_the_exact_values():
    inputs = torch.tensor([[0.0, 4.0], [8.0, 16.0], [32.0, 64.0]])
    mixed = MixPlan(torch.tensor([2, 0, 1]), torch.tensor([0.25, 0.5, 1.0])).apply(inputs)
    assert mixed.tolist() == [[24.0, 49.0], [4.0, 10.0], [32.0, 64.0]]


@pytest.mark.parametrize("shape", [(5, 3, 8, 8), (5, 7, 4), (5, 2), (5,), (1, 3, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lambda_1_and_0_give_one_of_the_two_to_the_bit(shape, dtype):
    inputs = torch.randn(shape).to(dtype)
    partner = torch.randperm(shape[0])
    ones = torch.ones(shape[0])
    assert torch.equal(MixPlan(partner, ones).apply(inputs), inputs)
    assert torch.equal(MixPlan(partner, 0 * ones).apply(inputs), inputs[partner])


def test_channels_last_stays():
    inputs = pictures().to(memory_format=torch.channels_last)
    partner, lam = torch.randperm(6), torch.rand(6)
    box = torch.tensor(cut_boxes(lam.numpy(), np.full((2, 6), 0.5), 8, 10))
    for mixed in (MixPlan(partner, lam).apply(inputs), paste(inputs, partner, box)):
        assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_paste_fills_the_box_from_the_partner():
    inputs = pictures()
    partner = torch.tensor([1, 2, 3, 4, 5, 0])
    box = torch.tensor(
        [[0, 2, 0, 8, 3, 0], [8, 5, 0, 8, 4, 8], [0, 1, 0, 0, 9, 4], [10, 9, 0, 9, 10, 5]]
    )
    mixed = paste(inputs, partner, box)
    for i, (top, bottom, left, right) in enumerate(box.T.tolist()):
        expected = inputs[i].clone()
        expected[:, top:bottom, left:right] = inputs[partner[i], :, top:bottom, left:right]
        assert torch.equal(mixed[i], expected)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_inputs_and_targets_agree_with_timm(kind, smoothing):
    """With timm's lambda, and its partners, which are the batch in reverse order."""
    inputs, targets = pictures(), torch.tensor([0, 3, 2, 2, 1, 4])
    alphas = {"mixup_alpha": 1.0} if kind == "mixup" else {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}
    theirs = TimmMixup(**alphas, label_smoothing=smoothing, num_classes=5)
    state = np.random.get_state()
    np.random.seed(3)
    lam_value, use_cutmix = theirs._params_per_batch()
    box = None
    if use_cutmix:
        from timm.data.mixup import cutmix_bbox_and_lam

        (top, bottom, left, right), lam_value = cutmix_bbox_and_lam(inputs.shape, lam_value)
        box = torch.tensor([[top], [bottom], [left], [right]]).expand(4, 6)
    np.random.seed(3)
    mixed, soft = theirs(inputs.clone(), targets)
    np.random.set_state(state)
    plan = MixPlan(torch.arange(5, -1, -1), torch.full((6,), lam_value), box)
    torch.testing.assert_close(plan.apply(inputs), mixed)
    from utils.training.objective import mixed_cross_entropy

    logits = torch.randn(6, 5)
    ours = mixed_cross_entropy(logits, targets, targets[plan.partner], plan.lam, smoothing)
    expected = -(soft * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(ours, expected)


# ---- partners and boxes -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 12, 13, 16, 17, 33])
@pytest.mark.parametrize("block", [1, 2, 4, 5, 16])
def test_partners_stay_in_their_block(n, block):
    partner = draw_partners(n, block, np.random.default_rng(0))
    assert sorted(partner.tolist()) == list(range(n))
    last = max(n // block - 1, 0) if block > 1 and n % block == 1 else n // block
    for i, p in enumerate(partner.tolist()):
        assert min(i // block, last) == min(p // block, last)


def test_partners_are_random_and_all_are_reached():
    drawn = np.stack([draw_partners(5, 8, np.random.default_rng(seed)) for seed in range(2000)])
    for i in range(5):
        counts = np.bincount(drawn[:, i], minlength=5)
        assert (abs(counts - 400) < 90).all()


def test_boxes_are_inside_and_have_their_area():
    rng = np.random.default_rng(0)
    lam, centre = rng.random(500), rng.random((2, 500))
    box = cut_boxes(lam, centre, 32, 24)
    top, bottom, left, right = box
    assert (top >= 0).all() and (bottom <= 32).all() and (top <= bottom).all()
    assert (left >= 0).all() and (right <= 24).all() and (left <= right).all()
    kept = area_outside(box, 32, 24)
    assert (kept >= lam - 1e-12).all()  # clipping makes a box smaller
    middle = cut_boxes(np.array([0.75, 1.0, 0.0]), np.full((2, 3), 0.5), 32, 24)
    assert middle.T.tolist() == [[8, 24, 6, 18], [16, 16, 12, 12], [0, 32, 0, 24]]
    assert area_outside(middle, 32, 24).tolist() == [0.75, 1.0, 0.0]


# ---- random draws -------------------------------------------------------------------------------


def test_lambda_follows_beta_and_is_one_for_a_step():
    mixing = Mixing(alpha=0.4, block=4)
    steps = [draws_of(mixing, step=step) for step in range(2000)]
    assert all((one.lam == one.lam[0]).all() and one.lam.dtype == np.float32 for one in steps)
    lam = np.array([one.lam[0] for one in steps])
    assert abs(lam.mean() - 0.5) < 0.03 and abs(lam.var() - 0.25 / 1.8) < 0.01  # of Beta(0.4, 0.4)


def test_each_sample_may_have_its_own_lambda():
    lam = draws_of(Mixing(alpha=1.0, block=5000, per_sample=True), n=5000).lam
    assert len(set(lam.tolist())) > 4900
    assert abs(lam.mean() - 0.5) < 0.02 and abs(lam.var() - 1 / 12) < 0.005


def test_each_block_may_have_its_own_lambda():
    mixing = Mixing(alpha=1.0, cutmix_alpha=1.0, block=4, per_block=True, height=64, width=64)
    for step in range(4):  # mixup and CutMix
        drawn = draws_of(mixing, n=13, step=step)
        assert [len({*part.tolist()}) for part in np.split(drawn.lam, [4, 8])] == [1, 1, 1]
        assert len({*drawn.lam.tolist()}) == 3
        assert drawn.box is None or len({*map(tuple, drawn.box.T.tolist())}) == 3


def test_a_step_of_one_block_has_one_lambda():
    one, other = (draws_of(Mixing(alpha=1.0, block=12, per_block=b)) for b in (False, True))
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b)


def test_blocks_are_mixed_with_the_given_probability():
    mixing = Mixing(alpha=1.0, block=50, probability=0.3, per_block=True)
    partners = draws_of(mixing, n=50_000).partner.reshape(-1, 50)
    mixed = (partners != np.arange(50_000).reshape(-1, 50)).mean(1)
    assert abs((mixed > 0).mean() - 0.3) < 0.06 and mixed[mixed > 0].min() > 0.8


def test_draws_depend_on_seed_epoch_and_step_alone():
    mixing = Mixing(alpha=1.0, block=4)
    one, again = draws_of(mixing), draws_of(mixing)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True) if a is not None)
    for other in (draws_of(mixing, step=1), draws_of(mixing, epoch=1), draws_of(mixing, seed=1)):
        assert other.lam[0] != one.lam[0]


@pytest.mark.parametrize("per_sample", [False, True])
def test_cutmix_has_the_lambda_of_its_box(per_sample):
    mixing = Mixing(cutmix_alpha=1.0, block=6, per_sample=per_sample, height=8, width=10)
    drawn = draws_of(mixing, n=6)
    assert drawn.box.shape == (4, 6)
    np.testing.assert_allclose(drawn.lam, area_outside(drawn.box, 8, 10), rtol=1e-6)
    assert (len({*map(tuple, drawn.box.T.tolist())}) > 1) is per_sample
    plan = drawn.plan(torch.arange(6))
    inputs = torch.arange(6.0)[:, None, None, None].expand(6, 3, 8, 10)
    own = (plan.apply(inputs) == inputs).double().mean((1, 2, 3))
    fixed = plan.partner == torch.arange(6)
    torch.testing.assert_close(own[~fixed], plan.lam.double()[~fixed], atol=1e-6, rtol=0)


def test_mixup_and_cutmix_take_turns():
    mixing = Mixing(alpha=1.0, cutmix_alpha=1.0, block=4)
    cut = np.mean([draws_of(mixing, step=step).box is not None for step in range(2000)])
    assert abs(cut - CUTMIX_FRACTION) < 0.04


@pytest.mark.parametrize("per_sample", [False, True])
def test_batches_are_mixed_with_the_given_probability(per_sample):
    mixing = Mixing(alpha=1.0, block=50, probability=0.3, per_sample=per_sample)
    steps = [draws_of(mixing, n=50, step=step) for step in range(1000)]
    if per_sample:
        mixed = np.mean([(one.partner != np.arange(50)).mean() for one in steps])
    else:
        mixed = np.mean([one is not None for one in steps])
    assert abs(mixed - 0.3) < 0.04


def test_no_batch_is_mixed_from_off_epoch_on():
    mixing = Mixing(alpha=1.0, block=4, off_epoch=2)
    assert [draws_of(mixing, epoch=epoch) is None for epoch in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_partners_may_be_restricted_to_other_classes():
    targets = torch.tensor([0, 0, 1, 1, 2, 0, 1, 0])
    drawn = draws_of(Mixing(alpha=1.0, block=8, different_classes=True), n=8)
    plan = drawn.plan(targets)
    for i, (before, after) in enumerate(zip(drawn.partner, plan.partner.tolist(), strict=True)):
        assert after == (i if targets[before] == targets[i] else before)
    assert (plan.partner != torch.from_numpy(drawn.partner)).any()


@pytest.mark.parametrize("n", [1, 2, 9, 13])
def test_slices_add_up_to_the_whole(n):
    """Micro-batches of 8 in blocks of 4: a single last sample joins the piece before it."""
    mixing = Mixing(alpha=1.0, cutmix_alpha=1.0, block=4, per_sample=True, height=8, width=8)
    inputs, targets = torch.randn(n, 3, 8, 8), torch.arange(n)
    for step in range(4):
        drawn = draws_of(mixing, n=n, step=step)
        whole = drawn.plan(targets).apply(inputs)
        borders = [0, n] if n <= 9 else [0, 8, n]
        for start, stop in itertools.pairwise(borders):
            piece = slice(start, stop)
            part = drawn.slice(piece).plan(targets[piece])
            assert torch.equal(part.apply(inputs[piece]), whole[piece])


def test_draws_for_learned_mixing():
    policy = Mixing(
        alpha=0.2, cutmix_alpha=1.0, block=4, meta_form="policy", clean_samples=7, update_every=3
    )
    drawn = [draws_of(policy, step=step) for step in range(30)]
    assert {one.lam_pending for one in drawn} == {True, False}
    for step, one in enumerate(drawn):
        assert one.lam_pending == (one.box is None)
        assert one.clean_samples == (7 if one.lam_pending and step % 3 == 0 else 0)
        assert not one.lam_pending or 0.5 <= one.lam[0] <= 1
        assert not one.clean_per_micro_batch and one.update_total == one.clean_samples
        assert (one.update_pairs is None) == (one.clean_samples == 0)
    sample = draws_of(Mixing(alpha=0.2, block=4, meta_form="sample", clean_samples=7), step=1)
    assert sample.lam_pending and len(set(sample.lam.tolist())) == 12
    assert (
        sample.clean_samples == 7 and sample.clean_per_micro_batch and sample.update_pairs is None
    )


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("n", [2, 5, 64, 100, 1000])
def test_pairs_of_a_policy_update_are_spread_evenly(n, count):
    mixing = Mixing(alpha=0.2, block=1, meta_form="policy", clean_samples=count)
    drawn, m = draws_of(mixing, n=n), min(n, count)
    chosen = [i for i in range(n) if (i + 1) * m // n > i * m // n]
    assert drawn.update_pairs.tolist() == chosen and len(chosen) == drawn.update_total == m
    spaces = np.diff([-1, *chosen])
    assert chosen[-1] == n - 1 and spaces.max() - spaces.min() <= 1
    found = []
    for start, stop in ((0, n // 3), (n // 3, n // 2), (n // 2, n)):
        part = drawn.slice(slice(start, stop))
        plan = part.plan(torch.zeros(stop - start, dtype=torch.int64))
        assert plan.update_pairs.dtype == torch.int64 and plan.update_total == m
        found += (plan.update_pairs + start).tolist()
    assert found == chosen


def test_a_step_that_leaves_no_clean_samples_is_refused():
    with pytest.raises(UserError, match="--batch_size"):
        Mixing(alpha=1.0, block=4, meta_form="policy", clean_samples=4).check(20, 19)
    Mixing(alpha=1.0, block=4).check(20, 20)


def test_a_plan_of_draws_keeps_its_types():
    plan = Draws(np.array([1, 0]), np.ones(2, np.float32), None, False, False).plan(
        torch.zeros(2).long()
    )
    assert plan.partner.dtype == torch.int64 and plan.lam.dtype == torch.float32
