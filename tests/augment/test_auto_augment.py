"""What a policy has drawn, carried out on a batch: against one picture at a time."""

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from launches import Launches
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import AutoAugment, _apply_op
from torchvision.transforms.v2 import functional as reference

from utils.augment.chain import part_of
from utils.augment.named_policies import parse_policy
from utils.augment.policies import ColourJitter, Operation, OperationPlan, Operations

N, SIDE = 60, 12
FILL = [124.0, 116.0, 104.0]
# Operation -> torchvision's function of (picture, argument); others are called by their names.
THEIRS = {
    Operation.NONE: lambda x, _: x,
    Operation.BRIGHTNESS: reference.adjust_brightness,
    Operation.CONTRAST: reference.adjust_contrast,
    Operation.SATURATION: reference.adjust_saturation,
    Operation.SHARPNESS: reference.adjust_sharpness,
    Operation.HUE: reference.adjust_hue,
    Operation.POSTERIZE: lambda x, bits: reference.posterize(x, int(bits)),
    Operation.SOLARIZE: lambda x, least: torch.where(x >= least, 255 - x, x),
    Operation.SOLARIZE_ADD: lambda x, add: torch.where(x < 128, (x + int(add)).clamp(max=255), x),
    Operation.INVERT: lambda x, _: 255 - x,
    Operation.AUTOCONTRAST: lambda x, _: reference.autocontrast(x),
    Operation.EQUALIZE: lambda x, _: reference.equalize(x),
    Operation.BLUR: lambda x, sigma: reference.gaussian_blur(x, [13, 13], [sigma, sigma]),
}
NAMES = {
    Operation.SHEAR_X: "ShearX",
    Operation.SHEAR_Y: "ShearY",
    Operation.ROTATE: "Rotate",
}


def pictures() -> torch.Tensor:
    rng = np.random.default_rng(3)
    small = torch.from_numpy(rng.integers(0, 256, (N, 3, 3, 3), dtype=np.uint8))
    return reference.resize(small, [SIDE, SIDE], antialias=True).permute(0, 2, 3, 1).contiguous()


def one_by_one(image: torch.Tensor, plan: OperationPlan, sample: int, fill) -> torch.Tensor:
    """(height, width, channels) uint8."""
    x = image.permute(2, 0, 1)
    for operation, value in zip(plan.operations[sample], plan.arguments[sample], strict=True):
        if operation in THEIRS:
            x = THEIRS[Operation(operation)](x, float(value))
        elif operation in NAMES:
            name = NAMES[Operation(operation)]
            x = _apply_op(x, name, float(value), InterpolationMode.BILINEAR, fill)
        else:  # by fractions of a pixel, which torchvision's affine takes, too
            sideways = operation == Operation.TRANSLATE_X
            move = [float(value), 0.0] if sideways else [0.0, float(value)]
            x = reference.affine(
                x, 0.0, move, 1.0, [0.0, 0.0], interpolation=InterpolationMode.BILINEAR, fill=fill
            )
    return x.permute(1, 2, 0)


@pytest.mark.parametrize(
    "name", ["ra", "rand-m9-mstd0.5-inc1", "rand-m7-n1-p1", "ta_wide", "original", "3a"]
)
def test_a_batch_equals_its_pictures_one_by_one(name):
    policy = parse_policy(name)
    drawing = [policy.make(SIDE, SIDE)]
    if policy.jitters:
        drawing.append(ColourJitter((0.3, 0.3, 0.3, 0.1)))
    fill = FILL if policy.mean_fill else None
    operations = Operations(drawing, fill)
    images, plan = pictures(), operations.draw(N, np.random.default_rng(1))
    before, result = images.clone(), operations.apply(images, plan)
    assert result.is_contiguous() and torch.equal(images, before)
    for sample in range(N):
        expected = one_by_one(images[sample], plan, sample, fill)
        off = (result[sample].int() - expected.int()).abs()
        # Where one operation rounds otherwise, later ones may make much of it: of few pixels.
        assert (off > 1).float().mean() < 0.02, (sample, plan.operations[sample])
    for piece in (slice(0, 0), slice(0, 1), slice(7, 31)):
        part = operations.apply(images[piece], part_of(plan, piece))
        assert torch.equal(part, result[piece])


class Recorded:
    """A generator that keeps what it has drawn."""

    def __init__(self):
        self.drawn, self._generator = [], np.random.default_rng(2)

    def integers(self, *args):
        return self._keep(self._generator.integers(*args))

    def random(self, n):
        return self._keep(self._generator.random(n))

    def _keep(self, values):
        self.drawn.append(values)
        return values


def test_autoaugment_is_torchvisions(monkeypatch):
    """With the same draws, one picture at a time."""
    generator, images = Recorded(), pictures()
    operations = Operations([parse_policy("imagenet").make(SIDE, SIDE)])
    result = operations.apply(images, operations.draw(N, generator))
    chosen, *rest = generator.drawn
    happens, positive = np.stack(rest[::2], 1), np.stack(rest[1::2], 1) >= 0.5
    theirs = AutoAugment(interpolation=InterpolationMode.BILINEAR)
    for sample in range(N):
        drawn = int(chosen[sample]), happens[sample], positive[sample]
        monkeypatch.setattr(theirs, "get_params", lambda _, drawn=drawn: drawn)
        expected = theirs(images[sample].permute(2, 0, 1)).permute(1, 2, 0)
        off = (result[sample].int() - expected.int()).abs()
        assert (off > 1).float().mean() < 0.02, (sample, theirs.policies[chosen[sample]])


@pytest.mark.slow
def test_launches_on_a_gpu_and_no_wait():
    """In a batch of any size, of pictures of any size. docs/pictures.md has these figures."""
    policies = {"rand-m9-mstd0.5-inc1": 210, "imagenet": 160, "ta_wide": 100, "3a": 125}
    for name, most in policies.items():
        policy = parse_policy(name)
        drawing = [policy.make(SIDE, SIDE)] + [ColourJitter((0.3,) * 3 + (0.0,))] * policy.jitters
        operations = Operations(drawing, FILL if policy.mean_fill else None)
        plan = operations.draw(256, np.random.default_rng(0))
        with fake_cuda() as gpu:
            images = torch.empty(256, SIDE, SIDE, 3, dtype=torch.uint8, device=CUDA)
            with gpu.watched(), Launches() as launches:
                result = operations.apply(images, plan)
        assert result.shape == images.shape and result.device == CUDA
        assert launches.counts.total() <= most, (name, launches.counts.total())
