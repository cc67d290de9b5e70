"""Random resized crop of decoded pictures, against torchvision's, one picture at a time."""

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from utils.augment.chain import part_of
from utils.augment.resized_crop import DecodedCrop, ResizedCropPlan, crop_and_resize

N = 16
BICUBIC = {"interpolation": InterpolationMode.BICUBIC, "antialias": True}


def pictures(height: int, width: int, channels: int = 3) -> torch.Tensor:
    rng = np.random.default_rng(0)
    small = torch.from_numpy(rng.integers(0, 256, (N, channels, 6, 6), dtype=np.uint8))
    large = reference.resize(small, [height, width], antialias=True)
    return large.permute(0, 2, 3, 1).contiguous()


def plain(images: torch.Tensor, windows: np.ndarray, flips: np.ndarray, size) -> torch.Tensor:
    results = []
    for image, window, flip in zip(images, windows.tolist(), flips, strict=True):
        planes = image.permute(2, 0, 1)
        planes = reference.resized_crop(planes, *window, list(size), **BICUBIC)
        results.append(planes.flip(2) if flip else planes)
    return torch.stack(results).permute(0, 2, 3, 1)


@pytest.mark.parametrize("channels", [3, 1])
def test_a_batch_equals_torchvisions_crops(channels):
    images, crop = pictures(24, 24, channels), DecodedCrop(area=0.1)
    plan = crop.draw(N, np.random.default_rng(1))
    windows = crop.windows(plan, np.full((N, 2), 24))
    assert 0 < plan.flip.sum() < N
    expected = plain(images, windows, plan.flip, (24, 24))
    result = crop.apply(images, plan)
    assert torch.equal(result, expected) and result.is_contiguous()
    for piece in (slice(3, 9), slice(0, 0)):
        assert torch.equal(crop.apply(images[piece], part_of(plan, piece)), expected[piece])


@pytest.mark.parametrize(("height", "width", "size"), [(24, 24, (24, 24)), (40, 31, (12, 10))])
def test_what_a_gpu_computes(height, width, size):
    images, crop = pictures(height, width), DecodedCrop()
    plan = crop.draw(N, np.random.default_rng(1))
    windows = crop.windows(plan, np.broadcast_to([height, width], (N, 2)))
    choices = np.concatenate([windows, plan.flip[:, None]], 1).T.astype(np.float32)
    result = crop_and_resize(images, torch.from_numpy(choices.copy()), size)
    off = (result.int() - plain(images, windows, plan.flip, size).int()).abs()
    assert off.max() <= 2 and (off > 0).float().mean() < 0.02


def test_a_window_of_everything_changes_nothing():
    images, zeros = pictures(16, 16), np.zeros(N)
    whole = DecodedCrop(area=1.0)
    plan = ResizedCropPlan(zeros + 0.5, zeros, zeros, zeros, zeros.astype(np.int64))
    assert torch.equal(whole.apply(images, plan), images)
    choices = torch.tensor([[0.0], [0.0], [16.0], [16.0], [0.0]]).expand(5, N)
    assert torch.equal(crop_and_resize(images, choices, (16, 16)), images)


def test_the_host_does_not_wait():
    crop = DecodedCrop()
    plan = crop.draw(4, np.random.default_rng(0))
    with fake_cuda() as gpu:
        images = torch.empty(4, 16, 16, 3, dtype=torch.uint8, device=CUDA)
        with gpu.watched():
            assert crop.apply(images, plan).shape == images.shape
