"""Operations on a batch against torchvision's, called for one picture after the other."""

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op
from torchvision.transforms.v2 import functional as reference

from utils.augment import operations as ops

N, HEIGHT, WIDTH = 12, 20, 26
RNG = np.random.default_rng(0)
FACTORS = np.linspace(0, 1.95, N)


def pictures(channels: int = 3) -> torch.Tensor:
    """Smooth ones with noise; the first is of a single colour, the second has little contrast."""
    small = torch.from_numpy(RNG.integers(0, 256, (N, channels, 5, 6), dtype=np.uint8))
    images = reference.resize(small, [HEIGHT, WIDTH], antialias=True)
    images[0], images[1] = 77, images[1] // 3 + 60
    return images


def differ(images: torch.Tensor, expected: list[torch.Tensor]) -> int:
    return (images.int() - torch.stack(expected).int()).abs().max().item()


def float32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(
    ("function", "theirs", "arguments"),
    [
        (ops.adjust_contrast, reference.adjust_contrast, FACTORS),
        (ops.adjust_saturation, reference.adjust_saturation, FACTORS),
        (ops.adjust_sharpness, reference.adjust_sharpness, FACTORS),
        (ops.adjust_hue, reference.adjust_hue, np.linspace(-0.5, 0.5, N)),
        (
            ops.gaussian_blur,
            lambda image, sigma: reference.gaussian_blur(image, [13, 13], [sigma, sigma]),
            np.linspace(0.1, 2, N),
        ),
        (
            lambda images, _: ops.autocontrast(images),
            lambda image, _: reference.autocontrast(image),
            FACTORS,
        ),
        (
            lambda images, _: ops.equalize(images),
            lambda image, _: reference.equalize(image),
            FACTORS,
        ),
    ],
    ids=["contrast", "saturation", "sharpness", "hue", "blur", "autocontrast", "equalize"],
)
def test_an_operation_equals_torchvisions(channels, function, theirs, arguments):
    images = pictures(channels)
    expected = [theirs(x, float(v)) for x, v in zip(images, arguments, strict=True)]
    assert differ(function(images, float32(arguments)), expected) <= 1


@pytest.mark.parametrize(
    ("tables", "theirs", "arguments"),
    [
        (ops.brightness_tables, reference.adjust_brightness, FACTORS),
        (ops.posterize_tables, lambda x, bits: reference.posterize(x, int(bits)), np.arange(N) % 9),
        (ops.solarize_tables, reference.solarize, np.linspace(0, 255, N)),
        (ops.invert_tables, lambda x, _: reference.invert(x), FACTORS),
        (
            ops.solarize_add_tables,
            lambda x, add: torch.where(x < 128, (x.int() + int(add)).clamp(max=255), x).byte(),
            np.arange(N) * 10,
        ),
    ],
    ids=["brightness", "posterize", "solarize", "invert", "solarize_add"],
)
def test_a_table_equals_torchvisions(tables, theirs, arguments):
    images = pictures()
    expected = [theirs(x, float(v)) for x, v in zip(images, arguments, strict=True)]
    assert differ(ops.look_up(images, torch.from_numpy(tables(arguments))), expected) == 0


@pytest.mark.parametrize("fill", [None, [124.0, 116.0, 104.0]])
@pytest.mark.parametrize(
    ("matrices", "name", "arguments"),
    [
        (ops.shear_x, "ShearX", np.linspace(-0.9, 0.9, N)),
        (ops.shear_y, "ShearY", np.linspace(-0.9, 0.9, N)),
        (ops.translate_x, "TranslateX", np.arange(N) * 3.0 - 15),
        (ops.translate_y, "TranslateY", np.arange(N) * 3.0 - 15),
        (ops.rotate, "Rotate", np.linspace(-135, 135, N)),
    ],
    ids=["shear_x", "shear_y", "translate_x", "translate_y", "rotate"],
)
def test_pixels_move_as_torchvisions_do(matrices, name, arguments, fill):
    images, bilinear = pictures(), InterpolationMode.BILINEAR
    expected = [
        _apply_op(x, name, float(v), bilinear, fill) for x, v in zip(images, arguments, strict=True)
    ]
    grid = ops.grid_matrices(matrices(arguments, HEIGHT, WIDTH), HEIGHT, WIDTH)
    moved = ops.warp(images, torch.from_numpy(grid), fill and torch.tensor(fill))
    assert differ(moved, expected) <= 1


def test_nothing_changes_where_the_argument_says_so():
    images = pictures()
    ones = torch.ones(N)
    for function in (ops.adjust_contrast, ops.adjust_saturation, ops.adjust_sharpness):
        assert torch.equal(function(images, ones), images)
    for matrices in (ops.shear_x, ops.shear_y, ops.translate_x, ops.translate_y, ops.rotate):
        grid = ops.grid_matrices(matrices(np.zeros(N), HEIGHT, WIDTH), HEIGHT, WIDTH)
        assert torch.equal(ops.warp(images, torch.from_numpy(grid), None), images)
    assert torch.equal(ops.autocontrast(images[:1]), images[:1])  # of a single colour
    assert torch.equal(ops.equalize(images[:1]), images[:1])
    tiny = images[..., :2, :2]
    assert torch.equal(ops.adjust_sharpness(tiny, 2 * ones), tiny)
    assert ops.gaussian_blur(tiny, ones).shape == tiny.shape
