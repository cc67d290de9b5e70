"""Random erasing, and chains of augmentations."""

import numpy as np
import pytest
import torch

from utils.augment.chain import Chain, part_of
from utils.augment.crop_flip import CropFlip
from utils.augment.random_erasing import AREA, ASPECT, ErasingPlan, RandomErasing

N = 50
COLOURS = {1: (77,), 3: (10, 20, 30)}


def pictures(height, width, channels, n=N):
    generator = np.random.default_rng(height)
    return generator.integers(100, 256, (n, height, width, channels), dtype=np.uint8)


def plain(images, plan, colour):
    """A loop over the images, with slices."""
    result = images.copy()
    for image, top, left, height, width in zip(result, *plan, strict=True):
        image[top : top + height, left : left + width] = colour
    return result


@pytest.mark.parametrize("size", [(8, 8, 3), (5, 9, 1), (12, 6, 3), (1, 1, 3)], ids=str)
def test_fills_only_the_plans_rectangles(size):
    images, colour = pictures(*size), COLOURS[size[2]]
    erasing = RandomErasing(*size[:2], 0.5, colour)
    plan = erasing.draw(N, np.random.default_rng(0))
    expected = plain(images, plan, colour)
    index = np.random.default_rng(1).permutation(N)[:20]
    some = part_of(plan, slice(20))
    picked = plain(images[index], some, colour)
    assert not np.array_equal(expected, images)
    assert np.array_equal(erasing.apply(images[index], some), picked)
    tensor = torch.from_numpy(images.copy())
    assert np.array_equal(erasing.apply(tensor[index], some), picked)
    on_device = erasing.apply_packed(tensor.clone(), torch.from_numpy(erasing.pack(plan)))
    assert np.array_equal(on_device, expected)
    assert np.array_equal(erasing.apply(tensor, plan), expected)
    assert erasing.apply(images, plan) is images and np.array_equal(images, expected)
    assert erasing.apply(images[:0], part_of(plan, slice(0))).shape == (0, *size)  # a filler


def test_rectangles_lie_inside_and_have_the_areas_and_aspects_of_the_paper():
    n, side = 20_000, 64
    erasing = RandomErasing(side, side, 0.25, (0,))
    plan = erasing.draw(n, np.random.default_rng(0))
    erased = plan.height > 0
    assert np.array_equal(erased, plan.width > 0)
    assert abs(erased.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)
    top, left, height, width = (choice[erased] for choice in plan)
    assert (top >= 0).all() and (top + height <= side).all() and (top + height == side).any()
    assert (left >= 0).all() and (left + width <= side).all() and (left + width == side).any()
    area, aspect = height * width / side**2, height / width
    assert AREA[0] * 0.9 < area.min() < 0.03 and 0.31 < area.max() < AREA[1] * 1.05
    assert abs(area.mean() - sum(AREA) / 2) < 0.005
    assert ASPECT[0] * 0.85 < aspect.min() < 0.35 and 2.9 < aspect.max() < ASPECT[1] * 1.15
    # The median is 1: flat and tall rectangles are equally likely.
    assert abs(np.log(aspect).mean()) < 0.03


def test_rectangles_are_clipped_and_probabilities_0_and_1_are_exact():
    plan = RandomErasing(2, 100, 1, (0,)).draw(500, np.random.default_rng(0))
    assert plan.height.min() >= 1 and (plan.top + plan.height).max() == 2
    assert plan.width.min() >= 1 and (plan.left + plan.width).max() <= 100
    never = RandomErasing(2, 100, 0, (0,)).draw(500, np.random.default_rng(0))
    assert not never.height.any() and not never.width.any()


def test_slices_of_a_plan_equal_the_whole():
    images = pictures(8, 8, 3)
    erasing = RandomErasing(8, 8, 0.7, COLOURS[3])
    plan = erasing.draw(N, np.random.default_rng(1))
    whole = erasing.apply(images.copy(), plan)
    for start in range(0, N, 7):
        piece = slice(start, start + 7)
        assert np.array_equal(
            erasing.apply(images[piece].copy(), part_of(plan, piece)), whole[piece]
        )


def test_a_chain_crops_like_crop_flip_and_then_erases():
    images = torch.from_numpy(pictures(8, 8, 3))
    crop, erasing = CropFlip(8, 8, padding=2, cutout=3), RandomErasing(8, 8, 0.5, COLOURS[3])
    chain = Chain(crop, erasing)
    plan = chain.draw(N, np.random.default_rng(4))
    alone = crop.draw(N, np.random.default_rng(4))
    assert all(map(np.array_equal, plan[0], alone))
    assert isinstance(plan[1], ErasingPlan)
    index = np.random.default_rng(5).permutation(N)
    before = images.clone()
    result = chain.apply(images, plan, index)
    expected = erasing.apply(crop.apply(images, alone, index), plan[1])
    assert torch.equal(result, expected) and torch.equal(images, before)
    piece = slice(10, 17)
    assert torch.equal(chain.apply(images, part_of(plan, piece), index[piece]), expected[piece])
    assert np.array_equal(chain.apply(images.numpy(), plan, index), expected)


def test_areas_and_aspects_are_distributed_as_documented():
    """Area fraction uniform, height / width log-uniform."""
    plan = RandomErasing(10, 12, 1.0, (0, 0, 0)).draw(N, np.random.default_rng(3))
    _, area, aspect, _, _ = np.random.default_rng(3).random((5, N))
    for index in range(N):
        pixels = (AREA[0] + (AREA[1] - AREA[0]) * area[index]) * 10 * 12
        ratio = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** aspect[index]
        height, width = (pixels * ratio) ** 0.5, (pixels / ratio) ** 0.5
        assert abs(plan.height[index] - np.clip(height, 1, 10)) <= 0.5 + 1e-9
        assert abs(plan.width[index] - np.clip(width, 1, 12)) <= 0.5 + 1e-9
