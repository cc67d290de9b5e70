"""Repeated augmentation: which samples an epoch has, and where their copies are."""

import numpy as np
import pytest
import torch

from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.named_policies import parse_policy
from utils.augment.policies import Operations
from utils.augment.random_erasing import RandomErasing
from utils.data.images.loader import ImageLoader
from utils.data.loader import repeated

SAMPLES, STEP, SIDE = 50, 12, 8
IMAGES = np.random.default_rng(0).integers(0, 256, (SAMPLES, SIDE, SIDE, 3), dtype=np.uint8)


def loader(repeats: int = 3, later: bool = True, **options) -> ImageLoader:
    operations = Operations([parse_policy("rand-m9-p1").make(SIDE, SIDE)], [1.0, 2.0, 3.0])
    return ImageLoader(
        IMAGES,
        np.arange(SAMPLES),
        **{"batch_size": 6, "step_size": STEP, "rank": 0, "ranks": 1} | options,
        mean=(0.5,) * 3,
        std=(0.2,) * 3,
        device=torch.device("cpu"),
        shuffle=True,
        augment=CropFlip(SIDE, SIDE, padding=2),
        later=Chain(operations, RandomErasing(SIDE, SIDE, 0.5, (1, 2, 3))) if later else None,
        repeats=repeats,
    )


@pytest.mark.parametrize(("repeats", "step"), [(3, 12), (4, 6), (2, 7), (60, 12)])
def test_as_many_samples_each_several_times(repeats, step):
    order = np.random.default_rng(0).permutation(SAMPLES)
    result = repeated(order, repeats, step)
    assert len(result) == SAMPLES
    values, counts = np.unique(result, return_counts=True)
    assert set(values) == set(order[: -(-SAMPLES // repeats)])
    assert sorted(counts)[1:] == [repeats] * (len(counts) - 1)  # the last one may be cut off
    assert np.array_equal(repeated(order, 1, step), order)


def test_copies_are_in_one_step_on_different_ranks():
    ranks = [loader(rank=rank, ranks=3, batch_size=4) for rank in range(3)]
    parts = [[batch.targets.numpy() for batch in each.epoch(2)] for each in ranks]
    for step in range(SAMPLES // STEP):
        assert all(np.array_equal(part[step], parts[0][step]) for part in parts)
        assert len(np.unique(parts[0][step])) == STEP // 3


def test_copies_are_augmented_differently_and_alike_at_any_number_of_ranks():
    alone = list(loader().epoch(1))
    copies = alone[0].inputs[alone[0].targets == alone[0].targets[0]]
    others = alone[1].inputs[alone[1].targets == alone[0].targets[0]]
    copies = torch.cat([copies, others])
    assert len(copies) == 3 and len(torch.unique(copies, dim=0)) == 3
    several = [loader(rank=rank, ranks=2).epoch(1) for rank in range(2)]
    parts = [part.inputs for pair in zip(*several, strict=True) for part in pair if not part.filler]
    whole = torch.cat([batch.inputs for batch in alone])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat([b.inputs for b in loader(batch_size=5).epoch(1)]), whole)
    resumed = torch.cat([batch.inputs for batch in loader().epoch(1, start_step=2)])
    assert torch.equal(resumed, whole[2 * STEP :])


def test_what_comes_later_leaves_the_crops_as_they_are():
    """An augmentation that is added draws after those before it."""
    plain = loader(later=False)
    assert plain.later is None and plain._can_defer and not loader()._can_defer
    drawn = CropFlip(SIDE, SIDE, padding=2)
    later = Chain(RandomErasing(SIDE, SIDE, 0.0, (1, 2, 3)))
    both = loader(later=False)
    both.later = later
    assert drawn == both.augment
    for one, other in zip(plain.epoch(0), both.epoch(0), strict=True):
        assert torch.equal(one.inputs, other.inputs)
