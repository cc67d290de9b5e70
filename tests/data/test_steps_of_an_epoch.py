"""The sizes that a step can be cut into, and loaders that cut theirs."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from toy import CPU, loader

from utils.data.steps import micro_batch_sizes
from utils.data.texts.equal_tokens import EqualTokensLoader
from utils.mixup.mixing import Mixing


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (1, [1]),
        (8, [8, 4, 2, 1]),
        (12, [12, 6, 4, 3, 2, 1]),
        (7, [7, 4, 2, 1]),  # a prime number
        (122, [122, 61, 31, 16, 8, 4, 2, 1]),
    ],
)
def test_sizes_divide_the_step_where_they_can(n, sizes):
    assert micro_batch_sizes(n) == sizes


def test_no_size_is_less_than_half_of_the_one_before():
    for n in range(1, 300):
        sizes = micro_batch_sizes(n)
        assert sizes[0] == n and sizes[-1] == 1
        for larger, smaller in pairwise(sizes):
            assert larger > smaller >= larger / 2


def test_sizes_keep_blocks_whole_as_long_as_they_can():
    assert micro_batch_sizes(48, block=8) == [48, 24, 16, 8, 4, 2, 1]
    assert micro_batch_sizes(20, block=8)[:2] == [24, 16]  # the step has a shorter last block


def micro_batches(loader, epoch=0) -> list[list[int]]:
    """The sizes of each step's micro-batches."""
    steps = [[]]
    for piece in loader.pieces(epoch, 0):
        steps[-1].append(piece.place.stop - piece.place.start)
        if piece.ends_step:
            steps.append([])
    return steps[:-1]


def test_pictures_are_cut_within_the_same_steps():
    whole, cut = loader(8, n=20), loader(8, n=20)
    assert cut.cuts() == [8, 4, 2]  # BatchNorm cannot train on one sample
    cut.cut(4)
    assert micro_batches(whole) == [[8], [8], [4]] and micro_batches(cut) == [[4, 4], [4, 4], [4]]
    assert np.array_equal(whole.order(0), cut.order(0))
    assert (cut.micro_batch, cut.accumulation, cut.step_size) == (4, 2, 8)
    targets = [torch.cat([batch.targets for batch in each.epoch(1)]) for each in (whole, cut)]
    assert torch.equal(*targets)
    with_accumulation = loader(2, 4, n=20)
    with_accumulation.cut(with_accumulation.cuts()[0])
    assert micro_batches(with_accumulation) == micro_batches(whole)


def test_a_lone_last_sample_makes_a_micro_batch_larger():
    data = loader(8, n=16 + 5)
    data.cut(4)
    assert data.largest() == 5 and max(max(step) for step in micro_batches(data)) == 5


@pytest.mark.parametrize("n", [1, 3, 30])
def test_a_trial_is_a_step_of_any_size(n):
    batch = loader(8, n=20).trial(n)
    assert batch.inputs.shape == (n, 3, 8, 8) and len(batch.targets) == batch.step_samples == n
    assert batch.ends_step and batch.mix_plan is None and batch.clean is None


def test_blocks_stay_as_long_as_they_fit():
    data = loader(8, n=40, mixing=Mixing(alpha=1.0, block=4))
    assert data.cuts() == [8, 4, 2]
    data.cut(2)
    assert data.mixing.block == 2
    data.cut(8)
    assert data.mixing.block == 4
    data = loader(4, 4, n=40, mixing=Mixing(alpha=1.0, block=4))
    data.cut(16)
    assert data.mixing.block == 4 and micro_batches(data)[0] == [16]


def test_a_trial_mixes_however_rarely_steps_do():
    mixing = Mixing(
        alpha=1.0, block=8, probability=0.3, meta_form="policy", clean_samples=6, update_every=9
    )
    batch = loader(8, n=40, mixing=mixing).trial(4)
    assert batch.mix_plan.lam_pending and len(batch.clean[1]) == 6


def texts(batch_tokens, accumulation=1, mixing=None, **options):
    lengths = np.random.default_rng(0).integers(2, 30, 200)
    offsets = np.append(0, np.cumsum(lengths))
    return EqualTokensLoader(
        np.arange(offsets[-1]), offsets, np.arange(200) % 4, batch_size=8, device=CPU,
        max_len=24, shuffle=True, batch_tokens=batch_tokens, accumulation=accumulation,
        mixing=mixing, **options,
    )  # fmt: skip


def test_texts_are_cut_by_tokens_within_the_same_steps():
    whole, cut = texts(512), texts(512)
    assert cut.cuts() == [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    cut.cut(64)
    cut.cut(128)
    assert np.array_equal(whole.order(3), cut.order(3))
    steps, fourths = micro_batches(whole), micro_batches(cut)
    assert list(map(sum, steps)) == list(map(sum, fourths))
    assert {len(step) for step in fourths} <= {3, 4}
    assert (cut.micro_batch, cut.accumulation, cut.step_size) == (128, 4, whole.step_size)
    again = texts(128, accumulation=4)  # as a resumed run makes it
    assert micro_batches(again) == fourths
    cut.cut(512)
    assert micro_batches(cut) == steps


@pytest.mark.parametrize("tokens", [512, 128, 64])
def test_a_trial_of_texts_has_as_many_tokens_as_any_batch(tokens):
    data = texts(512)
    data.cut(tokens)
    trial = data.trial(data.largest()).inputs
    most = max(len(batch.inputs.ids) for batch in data.epoch(0))
    assert len(trial.ids) >= most > len(trial.ids) - 24 and trial.longest == 24


def test_blocks_of_texts_give_way_to_small_micro_batches():
    data = texts(512, mixing=Mixing(alpha=1.0, block=8))
    data.cut(512)
    assert data.mixing.block == 8
    data.cut(96)
    assert data.mixing.block == 4
    data.cut(1)
    assert data.mixing.block == 2


@pytest.mark.parametrize(("learned", "clean"), [("policy", 4), ("sample", 7)])
def test_a_trial_has_the_clean_samples_of_one_rank(learned, clean):
    """The clean batch of a policy is divided among the ranks; with --meta_form sample each has a
    whole one."""
    mixing = Mixing(alpha=1.0, block=4, per_sample=True, meta_form=learned, clean_samples=7)
    for rank in (0, 1):
        data = loader(8, n=40, mixing=mixing, rank=rank, ranks=2)
        assert len(data.trial(8).clean[1]) == clean
        most = max(len(b.clean[1]) for b in data.epoch(0) if b.clean)
        assert most == clean - (learned == "policy" and rank == 1)


def test_a_micro_batch_that_only_fills_a_step_mixes_nothing():
    """The last step has two samples, both of the second rank; the first rank takes part in the
    collectives with samples that do not count."""
    mixing = Mixing(alpha=1.0, block=4, meta_form="policy", clean_samples=2)
    fillers = []
    for rank in (0, 1):
        for batch in loader(4, 2, n=18, mixing=mixing, rank=rank, ranks=2).epoch(0):
            plan, n = batch.mix_plan, len(batch.targets)
            assert len(plan.partner) == len(plan.lam) == n
            if batch.filler:
                fillers.append(rank)
                assert plan.partner.tolist() == list(range(n)) and (plan.lam == 1).all()
    assert fillers == [0]
