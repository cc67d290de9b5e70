"""Policies against timm's and torchvision's tables, and their names."""

import numpy as np
import pytest
from timm.data.auto_augment import LEVEL_TO_ARG, auto_augment_policy, rand_augment_choices
from torchvision.transforms.autoaugment import AutoAugment, RandAugment, TrivialAugmentWide

from utils.augment.named_policies import parse_jitter, parse_policy
from utils.augment.policies import ColourJitter, Operation
from utils.errors import UserError

HEIGHT, WIDTH = 60, 80
OURS = {
    "Identity": Operation.NONE,
    "ShearX": Operation.SHEAR_X,
    "ShearY": Operation.SHEAR_Y,
    "TranslateX": Operation.TRANSLATE_X,
    "TranslateY": Operation.TRANSLATE_Y,
    "TranslateXRel": Operation.TRANSLATE_X,
    "TranslateYRel": Operation.TRANSLATE_Y,
    "Rotate": Operation.ROTATE,
    "Brightness": Operation.BRIGHTNESS,
    "Color": Operation.SATURATION,
    "Contrast": Operation.CONTRAST,
    "Sharpness": Operation.SHARPNESS,
    "Posterize": Operation.POSTERIZE,
    "PosterizeOriginal": Operation.POSTERIZE,
    "Solarize": Operation.SOLARIZE,
    "SolarizeAdd": Operation.SOLARIZE_ADD,
    "AutoContrast": Operation.AUTOCONTRAST,
    "Equalize": Operation.EQUALIZE,
    "Invert": Operation.INVERT,
}
BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")


def drawn(name: str, n: int = 4000) -> dict:
    """{operation: (how many, its arguments)}."""
    plan = parse_policy(name).make(HEIGHT, WIDTH).draw(n, np.random.default_rng(0))
    return {
        operation: (
            int((plan.operations == operation).sum()),
            plan.arguments[plan.operations == operation],
        )
        for operation in np.unique(plan.operations).tolist()
    }


def torchvision_values(name: str, space: dict, number: int | slice) -> np.ndarray:
    """The arguments that torchvision passes to its functions."""
    magnitudes, signed = space[name]
    if magnitudes.ndim == 0:
        return np.zeros(1)
    values = np.atleast_1d(magnitudes[number].double().numpy())
    values = np.concatenate([values, -values]) if signed else values
    if name.startswith("Translate"):
        values = np.trunc(values)
    return np.unique((1 + values if name in BLENDS else values).round(6))


@pytest.mark.parametrize(
    ("name", "space", "number"),
    [
        ("ra", RandAugment()._augmentation_space(31, (HEIGHT, WIDTH)), 9),
        ("randaugment-m17-n3", RandAugment()._augmentation_space(31, (HEIGHT, WIDTH)), 17),
        ("ta_wide", TrivialAugmentWide()._augmentation_space(31), slice(None)),
    ],
)
def test_torchvisions_operations_and_arguments(name, space, number):
    found = drawn(name)
    assert found.keys() == {OURS[each] for each in space}
    total = sum(count for count, _ in found.values())
    for each in space:
        count, values = found[OURS[each]]
        assert abs(count / total - 1 / len(space)) < 0.02
        expected = torchvision_values(each, space, number)
        # torchvision cuts 32 * 15 / 30 off to 15 pixels: its linspace is in float32.
        within = 1 if each.startswith("Translate") else 2e-5
        np.testing.assert_allclose(np.unique(values.round(6)), expected, atol=within)


@pytest.mark.parametrize("increasing", [False, True])
def test_timms_operations_and_arguments(increasing):
    found = drawn(f"rand-m7-n1-p1-inc{int(increasing)}")
    names = rand_augment_choices("", increasing=increasing)
    assert found.keys() == {OURS[name.removesuffix("Increasing")] for name in names}
    for name in names:
        argument = LEVEL_TO_ARG[name]
        # timm draws a sign with every call.
        expected = {argument(7.0, {})[0] if argument else 0.0 for _ in range(40)}
        expected = np.array(sorted(expected), float)
        if name.startswith("Translate"):
            expected *= WIDTH if "X" in name else HEIGHT
        _, values = found[OURS[name.removesuffix("Increasing")]]
        np.testing.assert_allclose(np.unique(values), expected, atol=1e-9)


def test_timms_levels_and_probability():
    def levels(name: str) -> np.ndarray:
        return np.abs(drawn(name)[Operation.ROTATE][1]) / 3  # of 10

    assert abs(levels("rand-m5-mstd0.5").std() - 0.5) < 0.06
    assert levels("rand-m9-mstd2").max() == 10 and levels("rand-m9-mstd2-mmax20").max() > 11
    uniform = levels("rand-m8-mstdinf")
    assert uniform.max() <= 8 and abs(uniform.mean() - 4) < 0.4
    assert abs(drawn("rand-m5")[Operation.NONE][0] / 8000 - 0.5) < 0.02
    assert abs(drawn("rand-m5-p0.2")[Operation.NONE][0] / 8000 - 0.8) < 0.02


def rows_of(steps) -> set:
    """The pairs of operations and arguments that a pair (operation, probability, its arguments) of
    AutoAugment may lead to."""
    found = [
        [(0, 0.0)] * (probability < 1) + [(operation, v) for v in values] * (probability > 0)
        for operation, probability, values in steps
    ]
    return {(*one, *other) for one in found[0] for other in found[1]}


def test_torchvisions_autoaugment():
    space = AutoAugment()._augmentation_space(10, (HEIGHT, WIDTH))
    pairs = [
        [(OURS[name], p, torchvision_values(name, space, m or 0)) for name, p, m in pair]
        for pair in AutoAugment().policies
    ]
    assert_pairs("imagenet", pairs)


def test_timms_autoaugment():
    def values(op) -> set:
        # timm draws a sign with every call.
        return {op.level_fn(op.magnitude, {})[0] if op.level_fn else 0.0 for _ in range(40)}

    subs = auto_augment_policy("original", {})
    assert_pairs("original", [[(OURS[op.name], op.prob, values(op)) for op in sub] for sub in subs])


def assert_pairs(name: str, pairs: list) -> None:
    plan = parse_policy(name).make(HEIGHT, WIDTH).draw(20_000, np.random.default_rng(0))
    columns = np.stack([plan.operations, plan.arguments], 2).reshape(-1, 4).round(4)
    expected = {tuple(np.round(row, 4).tolist()) for pair in pairs for row in rows_of(pair)}
    assert {*map(tuple, columns.tolist())} == expected
    counts = np.zeros(len(Operation))
    for operation, probability, _ in [step for pair in pairs for step in pair]:
        counts[operation] += probability / (2 * len(pairs))
    found = np.bincount(plan.operations.ravel(), minlength=len(Operation)) / plan.operations.size
    assert np.abs(found - counts)[1:].max() < 0.01


def test_three_augment_is_timms():
    found = drawn("3a")
    (((_, _, solarize),), *_) = [[tuple(op) for op in policy] for policy in _three()]
    threshold = LEVEL_TO_ARG["Solarize"](solarize, {})[0]
    assert found.keys() == {Operation.SATURATION, Operation.SOLARIZE, Operation.BLUR}
    assert set(found[Operation.SOLARIZE][1]) == {threshold}
    assert set(found[Operation.SATURATION][1]) == {0.0}  # grey
    blur = found[Operation.BLUR][1]
    assert 0.1 <= blur.min() < 0.15 and 1.95 < blur.max() <= 2
    assert all(abs(count / 4000 - 1 / 3) < 0.03 for count, _ in found.values())


def _three():
    """(name, probability, magnitude) of timm's policy."""
    return [
        [(op.name, op.prob, op.magnitude) for op in sub] for sub in auto_augment_policy("3a", {})
    ]


def test_colour_jitter():
    plan = ColourJitter(parse_jitter("0.4,1.5,0.2,0.1")).draw(2000, np.random.default_rng(0))
    assert plan.operations.shape == (2000, 4)
    assert len(np.unique(plan.operations, axis=0)) == 24  # every order
    assert (np.sort(plan.operations, 1) == np.sort(plan.operations[0])).all()
    ranges = {
        Operation.BRIGHTNESS: (0.6, 1.4),
        Operation.CONTRAST: (0, 2.5),
        Operation.SATURATION: (0.8, 1.2),
        Operation.HUE: (-0.1, 0.1),
    }
    for operation, (low, high) in ranges.items():
        values = plan.arguments[plan.operations == operation]
        assert low <= values.min() < low + 0.02 and high - 0.02 < values.max() <= high
    assert (
        ColourJitter(parse_jitter("0.4")).draw(3, np.random.default_rng(0)).operations.shape[1] == 3
    )


@pytest.mark.parametrize(
    "text",
    ["augmix-m5-w4-d2", "cifar10", "v0", "imagenet-m3", "original-mstd0.5", "rand-m9-tweights",
     "rand-m", "ra-m31", "ra-inc1", "rand-n0", "rand-p2", "ta_wide-m3", "3a-m3", "-", ""],
)  # fmt: skip
def test_what_is_not_here_is_refused_in_one_line(text):
    with pytest.raises(UserError, match=r"^--auto_augment [^\n]+$"):
        parse_policy(text)


def test_names_in_any_case():
    assert parse_policy("none") is None
    assert parse_policy("RandAugment").make(8, 8).stages == 2
    assert parse_policy("TrivialAugmentWide").make(8, 8).bins == 31


@pytest.mark.parametrize("text", ["x", "0.4,0.4", "-1", "0.4,0.4,0.4,0.6", "inf", ""])
def test_no_jitter_is_refused_in_one_line(text):
    with pytest.raises(UserError, match=r"^--color_jitter [^\n]+$"):
        parse_jitter(text)
