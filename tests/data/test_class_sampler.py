"""--class_sampler balanced: which samples an epoch has."""

import numpy as np
import pytest
import torch

from utils.data.class_sampler import ClassSampler
from utils.data.images.loader import ImageLoader
from utils.data.loader import HoldOut
from utils.data.texts.loader import TextLoader

CPU = torch.device("cpu")
LABELS = np.repeat([0, 1, 2, 3], [700, 200, 80, 20])


def picture_loader(labels=LABELS, batch_size=50, **options):
    images = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return ImageLoader(
        images, labels, mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=batch_size, device=CPU,
        shuffle=True, seed=3, by_class=True, **options,
    )  # fmt: skip


def text_loader(**options):
    """Texts of the small classes are long."""
    lengths = np.array([3, 5, 20, 40])[LABELS]
    tokens = np.ones(lengths.sum(), np.int32)
    return TextLoader(
        tokens, np.append(0, np.cumsum(lengths)), LABELS, batch_size=50, device=CPU, max_len=50,
        shuffle=True, seed=3, by_class=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("make", [picture_loader, text_loader])
def test_every_class_is_equally_likely(make):
    loader = make()
    orders = [loader.order(epoch) for epoch in range(20)]
    assert all(len(order) == len(LABELS) for order in orders)
    counts = np.bincount(LABELS[np.concatenate(orders)])
    assert abs(counts / counts.sum() - 0.25).max() < 0.01  # 3 standard deviations
    of_smallest = np.concatenate(orders)
    times = np.bincount(of_smallest[of_smallest >= 980] - 980)
    assert len(times) == 20 and times.min() > 200 and times.max() < 300  # 250 +- 16 expected


def test_seed_and_epoch_alone_decide():
    whole = np.concatenate([batch.targets for batch in picture_loader().epoch(2)])
    assert np.array_equal(whole, LABELS[picture_loader().order(2)])
    assert not np.array_equal(picture_loader().order(2), picture_loader().order(3))
    resumed = [batch.targets for batch in picture_loader().epoch(2, start_step=7)]
    assert np.array_equal(np.concatenate(resumed), whole[350:])
    ranks = [
        [batch.targets for batch in picture_loader(batch_size=25, rank=rank, ranks=2).epoch(2)]
        for rank in (0, 1)
    ]
    by_turns = [part for step in zip(*ranks, strict=True) for part in step]
    assert np.array_equal(np.concatenate(by_turns), whole)


def test_held_out_samples_are_not_drawn():
    hold_out = HoldOut(np.arange(0, 1000, 2), 1000)
    loader = picture_loader(hold_out=hold_out)
    hold_out.release_from(2)
    assert (loader.order(1) % 2).all() and not (loader.order(2) % 2).all()
    counts = np.bincount(LABELS[loader.order(1)])
    assert counts.min() > 190


def test_repeats_are_of_the_samples_that_were_drawn():
    order = picture_loader(repeats=5).order(0)
    _, times = np.unique(order[:50], return_counts=True)
    assert len(order) == 1000 and not (times % 5).any()
    assert abs(np.bincount(LABELS[order]) - 250).max() < 120


def test_classes_without_samples_are_never_drawn():
    sampler = ClassSampler(np.array([0, 0, 0, 2] * 250))
    drawn = sampler.draw(np.random.default_rng(0))
    assert abs((drawn % 4 == 3).mean() - 0.5) < 0.05
    assert sampler.mean(np.array([1.0, 2.0, 3.0, 10.0] * 250)) == 6.0


def test_micro_batches_by_tokens_count_on_the_texts_that_are_drawn():
    loader = text_loader(batch_tokens=400)
    for epoch in range(3):
        tokens = [len(batch.inputs.ids) for batch in loader.epoch(epoch)]
        assert abs(np.mean(tokens) - 400) < 40
