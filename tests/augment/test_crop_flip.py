"""Crop, flip and cutout: both implementations equal a loop over images to the bit."""

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from utils.augment.chain import part_of
from utils.augment.crop_flip import CropFlip, CropFlipPlan
from utils.errors import UserError

N = 9
SIZES = [(8, 8, 3), (5, 9, 3), (12, 6, 1), (7, 5, 5)]


def pictures(height, width, channels, n=N):
    generator = np.random.default_rng(height * width)
    pixels = generator.integers(1, 256, (n, height, width, channels), dtype=np.uint8)
    return torch.from_numpy(pixels)  # no black pixels, so that blank ones stand out


def plain(augment: CropFlip, image: np.ndarray, top, left, flip, hole_y, hole_x) -> np.ndarray:
    """One image: pad, slice, reverse, blank."""
    p = augment.padding
    pad = [(p, p), (p, p), (0, 0)]
    padded = np.pad(image, pad, "constant" if augment.mode == "zeros" else "reflect")
    result = padded[top : top + augment.height, left : left + augment.width].copy()
    if flip:
        result = result[:, ::-1].copy()
    y, x = hole_y - augment.cutout // 2, hole_x - augment.cutout // 2
    result[max(0, y) : max(0, y + augment.cutout), max(0, x) : max(0, x + augment.cutout)] = 0
    return result


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_array_and_packed_plan_equal_a_loop_over_images(size, mode):
    images = pictures(*size)
    generator = np.random.default_rng(0)
    for padding, flip, cutout in itertools.product(range(5), (0, 0.5, 1), (0, 1, 4, 5)):
        augment = CropFlip(*size[:2], padding, mode, flip, cutout)
        plan = augment.draw(N, generator)
        expected = [
            plain(augment, image, *choice)
            for image, *choice in zip(images.numpy(), *plan, strict=True)
        ]
        expected = torch.from_numpy(np.stack(expected))
        index = np.arange(len(images))
        packed = torch.from_numpy(augment.pack(plan, index))
        assert torch.equal(augment.apply_packed(images, packed), expected)
        assert np.array_equal(augment.apply_to_array(images.numpy(), plan, index), expected)
        assert np.array_equal(augment.apply(images.numpy(), plan), expected)
        assert torch.equal(augment.apply(images.clone(), plan), expected)


def test_every_crop_of_reflected_padding_equals_pytorch():
    images = pictures(6, 7, 3, n=1)
    padded = F.pad(images.permute(0, 3, 1, 2).double(), (3, 3, 3, 3), mode="reflect")
    augment = CropFlip(6, 7, padding=3, mode="reflect", flip=0)
    for top, left in itertools.product(range(7), range(7)):
        plan = CropFlipPlan(*(np.array([choice]) for choice in (top, left, 0, 0, 0)))
        expected = padded[:, :, top : top + 6, left : left + 7].permute(0, 2, 3, 1)
        assert torch.equal(augment.apply(images.clone(), plan).double(), expected)


def test_everything_off_is_the_identity():
    images = pictures(8, 6, 3)
    augment = CropFlip(8, 6, padding=0, flip=0, cutout=0)
    plan = augment.draw(N, np.random.default_rng(0))
    index = np.arange(N)
    packed = torch.from_numpy(augment.pack(plan, index))
    assert np.array_equal(augment.apply_to_array(images.numpy(), plan, index), images)
    assert torch.equal(augment.apply_packed(images, packed), images)


def test_centre_crop_is_the_identity_and_a_flip_undoes_itself():
    images = pictures(8, 6, 3)
    augment = CropFlip(8, 6, padding=2, flip=1)
    centre, zeros, ones = np.full(N, 2), np.zeros(N, np.int64), np.ones(N, np.int64)
    plan = CropFlipPlan(centre, centre, ones, zeros, zeros)
    once = augment.apply(images.clone(), plan)
    assert torch.equal(once, images.flip(2))
    assert torch.equal(augment.apply(once, plan), images)


def test_slices_of_a_plan_equal_the_whole():
    images = pictures(8, 8, 3)
    augment = CropFlip(8, 8, padding=3, cutout=3)
    plan = augment.draw(N, np.random.default_rng(1))
    whole = augment.apply(images.clone(), plan)
    parts = [
        augment.apply(images[i : i + 4].clone(), part_of(plan, slice(i, i + 4))) for i in (0, 4, 8)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_crop_positions_are_uniform():
    n = 40_000
    augment = CropFlip(8, 6, padding=2, flip=0.25, cutout=2)
    plan = augment.draw(n, np.random.default_rng(0))
    for choice, values in ((plan.top, 5), (plan.left, 5), (plan.hole_y, 8), (plan.hole_x, 6)):
        counts = np.bincount(choice, minlength=values)
        assert len(counts) == values
        p = 1 / values
        assert np.abs(counts - n * p).max() < 5 * np.sqrt(n * p * (1 - p))
    assert abs(plan.flip.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)
    assert abs(np.corrcoef(plan.top, plan.left)[0, 1]) < 5 / np.sqrt(n)


def test_draws_are_reproducible_and_independent_of_disabled_features():
    def draw(**settings):
        return CropFlip(8, 8, padding=2, **settings).draw(50, np.random.default_rng(5))

    one, other = draw(), draw(flip=0, cutout=4)
    for name in ("top", "left", "hole_y", "hole_x"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.flip.any() and not other.flip.any()


@pytest.mark.parametrize("padding", [5, 6, 40])
def test_padding_as_large_as_the_image(padding):
    with pytest.raises(UserError, match="--crop_padding"):
        CropFlip(5, 8, padding=padding)


def test_pickling_keeps_the_settings_and_drops_the_buffers():
    images = pictures(8, 8, 3).numpy()
    augment = CropFlip(8, 8, padding=3, cutout=2)
    plan = augment.draw(N, np.random.default_rng(0))
    expected = augment.apply(images, plan)
    sent = pickle.dumps(augment)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).apply(images, plan), expected)


def test_the_module_does_not_import_pytorch():
    code = (
        "import sys, utils.augment.crop_flip, utils.augment.chain, utils.augment.random_erasing;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_unknown_mode():
    with pytest.raises(ValueError, match="reflect"):
        CropFlip(8, 8, mode="edge")
