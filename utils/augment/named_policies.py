"""The policies of timm and torchvision, by their names: AutoAugment for ImageNet, RandAugment,
TrivialAugment, 3-Augment and colour jitter.

AutoAugment: Cubuk et al. (2019), arXiv:1805.09501. RandAugment: Cubuk et al. (2019),
arXiv:1909.13719. TrivialAugment: Müller and Hutter (2021), arXiv:2103.10158. 3-Augment: Touvron,
Cord and Jégou, "DeiT III" (2022), arXiv:2204.07118. Operations and ranges are torchvision's or
timm's, whichever names the policy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UserError
from .policies import Choice, OneOf, OneOfPairs, Operation, Step

# 3-Augment, with the ranges of timm and of the paper's code.
THREE = (
    Choice(Operation.SATURATION),  # grey
    Choice(Operation.SOLARIZE, lambda x: np.full_like(x, 128)),
    Choice(Operation.BLUR, lambda x: 0.1 + 1.9 * x),
)

# AutoAugment's pairs of operations for ImageNet, with the probability and the magnitude of each (0
# where an operation has no argument).
IMAGENET = """
    posterize 0.4 8    rotate 0.6 9
    solarize 0.6 5     autocontrast 0.6 0
    equalize 0.8 0     equalize 0.6 0
    posterize 0.6 7    posterize 0.6 6
    equalize 0.4 0     solarize 0.2 4
    equalize 0.4 0     rotate 0.8 8
    solarize 0.6 3     equalize 0.6 0
    posterize 0.8 5    equalize 1.0 0
    rotate 0.2 3       solarize 0.6 8
    equalize 0.6 0     posterize 0.4 6
    rotate 0.8 8       saturation 0.4 0
    rotate 0.4 9       equalize 0.6 0
    equalize 0.0 0     equalize 0.8 0
    invert 0.6 0       equalize 1.0 0
    saturation 0.6 4   contrast 1.0 8
    rotate 0.8 8       saturation 1.0 2
    saturation 0.8 8   solarize 0.8 7
    sharpness 0.4 7    invert 0.6 0
    shear_x 0.6 5      equalize 1.0 0
    saturation 0.4 0   equalize 0.6 0
    equalize 0.4 0     solarize 0.2 4
    solarize 0.6 5     autocontrast 0.6 0
    invert 0.6 0       equalize 1.0 0
    saturation 0.6 4   contrast 1.0 8
    equalize 0.8 0     equalize 0.6 0
"""

KNOWN = (
    "imagenet (torchvision's AutoAugment), original (timm's), ta_wide (TrivialAugment), ra "
    "(torchvision's RandAugment), timm's strings for RandAugment such as rand-m9-mstd0.5-inc1, 3a "
    "(3-Augment) and none"
)
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+|inf)"


@dataclass(frozen=True)
class Policy:
    """What --auto_augment names.

    Args:
        make: (height, width) of the pictures -> what draws their operations.
        mean_fill: pixels from outside the picture have the mean colour, as with timm; else they are
            black, as with torchvision.
        jitter: --color_jitter, if that is not given.
        jitters: whether --color_jitter has an effect beside this policy: if it has with timm.
    """

    make: Callable[[int, int], OneOf | OneOfPairs]
    mean_fill: bool = True
    jitter: str = "0"
    jitters: bool = False


def parse_policy(text: str) -> Policy | None:
    """The policy that `text`, one of timm's or torchvision's names, stands for; None for "none".

    Raises:
        UserError: there is no such policy.
    """
    if text.strip().lower() == "none":
        return None
    name, *parts = text.strip().lower().split("-")
    if name in ("imagenet", "autoaugment") and not parts:
        return Policy(_torchvision_imagenet, mean_fill=False)
    if name == "original" and not parts:
        return Policy(_timm_original)
    if name in ("ta_wide", "trivialaugment", "trivialaugmentwide") and not parts:
        return Policy(lambda height, width: OneOf(_torchvision_wide(), bins=31), mean_fill=False)
    if name in ("ra", "randaugment"):
        values = _options(text, parts, {"m": 9.0, "n": 2.0})
        if not 0 <= values["m"] <= 30:
            raise UserError(f"--auto_augment {text}: m is 0 to 30 in torchvision's RandAugment")
        return Policy(
            lambda height, width: OneOf(
                _torchvision(height, width), stages=int(values["n"]), level=values["m"] / 30
            ),
            mean_fill=False,
        )
    if name == "rand":
        return Policy(_timm(text, parts))
    if name == "3a" and not parts:
        three = OneOf(THREE, deviation=math.inf)
        return Policy(lambda height, width: three, jitter="0.3", jitters=True)
    raise UserError(f"--auto_augment {text}: unknown policy; available policies: {KNOWN}")


def parse_jitter(text: str) -> tuple[float, float, float, float]:
    """The strengths of brightness, contrast, saturation and hue from "0.4" (all but hue),
    "0.4,0.4,0.4" or "0.4,0.4,0.4,0.1".

    Raises:
        UserError: they are no such numbers.
    """
    words = text.replace(",", " ").split()
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    if len(values) == 1:
        values *= 3
    if len(values) == 3:
        values.append(0.0)
    fits = len(values) == 4 and all(0 <= v < math.inf for v in values) and values[3] <= 0.5
    if not fits:
        raise UserError(
            f"--color_jitter {text}: give one number for brightness, contrast and saturation, or "
            "three, or four with hue, which is at most 0.5"
        )
    return values[0], values[1], values[2], values[3]


def _options(text: str, parts: list[str], values: dict[str, float]) -> dict[str, float]:
    """`values` with those that `parts`, such as m9 and mstd0.5, set."""
    for part in parts:
        found = re.fullmatch(rf"([a-z]+)({_NUMBER})", part)
        if found is None or found[1] not in values:
            raise UserError(
                f"--auto_augment {text}: {part!r} is none of {', '.join(values)} with a number"
            )
        values = values | {found[1]: float(found[2])}
    if values["n"] < 1 or values["n"] % 1:
        raise UserError(f"--auto_augment {text}: n is the number of operations, at least 1")
    return values


def _imagenet(choices: tuple[Choice, ...], largest: int) -> OneOfPairs:
    """The pairs of IMAGENET, whose magnitudes are parts of `largest`."""
    known = {choice.operation.name.lower(): choice for choice in choices}
    pairs = []
    for line in IMAGENET.strip().splitlines():
        words = line.split()
        numbered = (words[:3], words[3:])
        first, second = (Step(known[a], float(p), int(m) / largest) for a, p, m in numbered)
        pairs.append((first, second))
    return OneOfPairs(tuple(pairs))


def _torchvision_imagenet(height: int, width: int) -> OneOfPairs:
    return _imagenet((*_torchvision(height, width), Choice(Operation.INVERT)), largest=9)


def _timm_original(height: int, width: int) -> OneOfPairs:
    posterize = Choice(Operation.POSTERIZE, lambda x: 4 + np.trunc(4 * x))  # of its own there
    return _imagenet((*_timm_choices(height, width, increasing=False), posterize), largest=10)


def _torchvision(height: int, width: int) -> tuple[Choice, ...]:
    return _torchvision_choices(
        shear=0.3, move_x=150 / 331 * width, move_y=150 / 331 * height, turn=30, factor=0.9, bits=4
    )


def _torchvision_wide() -> tuple[Choice, ...]:
    return _torchvision_choices(shear=0.99, move_x=32, move_y=32, turn=135, factor=0.99, bits=6)


def _torchvision_choices(shear, move_x, move_y, turn, factor, bits) -> tuple[Choice, ...]:
    """Largest changes -> choices. Translations are by whole pixels, as there."""
    blends = (
        Operation.BRIGHTNESS,
        Operation.SATURATION,
        Operation.CONTRAST,
        Operation.SHARPNESS,
    )
    return (
        Choice(Operation.NONE),
        Choice(Operation.SHEAR_X, lambda x: shear * x, signed=True),
        Choice(Operation.SHEAR_Y, lambda x: shear * x, signed=True),
        Choice(Operation.TRANSLATE_X, lambda x: np.trunc(move_x * x), signed=True),
        Choice(Operation.TRANSLATE_Y, lambda x: np.trunc(move_y * x), signed=True),
        Choice(Operation.ROTATE, lambda x: turn * x, signed=True),
        *(Choice(blend, lambda x: 1 + factor * x, signed=True) for blend in blends),
        Choice(Operation.POSTERIZE, lambda x: 8 - np.rint(bits * x)),
        Choice(Operation.SOLARIZE, lambda x: 255 - 255 * x),
        Choice(Operation.AUTOCONTRAST),
        Choice(Operation.EQUALIZE),
    )


def _timm(text: str, parts: list[str]) -> Callable[[int, int], OneOf]:
    defaults = {"m": 10.0, "n": 2.0, "p": 0.5, "mstd": 0.0, "mmax": 10.0, "inc": 0.0}
    values = _options(text, parts, defaults)
    if values["p"] > 1:
        raise UserError(f"--auto_augment {text}: p is a probability, 0 to 1")
    policy = OneOf(
        (),
        stages=int(values["n"]),
        probability=values["p"],
        level=values["m"] / 10,
        deviation=math.inf if values["mstd"] > 100 else values["mstd"] / 10,
        most=values["mmax"] / 10,
    )
    return lambda height, width: replace(
        policy, choices=_timm_choices(height, width, increasing=bool(values["inc"]))
    )


def _timm_choices(height: int, width: int, increasing: bool) -> tuple[Choice, ...]:
    """timm's operations; `increasing`: those whose effect is stronger at a higher level."""

    def blend(x: np.ndarray) -> np.ndarray:
        return np.maximum(0.1, 1 + 0.9 * x) if increasing else 0.1 + 1.8 * x

    def bits(x: np.ndarray) -> np.ndarray:
        kept = np.clip(np.trunc(4 * x), 0, 4)
        return 4 - kept if increasing else kept

    def threshold(x: np.ndarray) -> np.ndarray:
        least = np.minimum(256, np.trunc(256 * x))
        return 256 - least if increasing else least

    blends = (
        Operation.SATURATION,
        Operation.CONTRAST,
        Operation.BRIGHTNESS,
        Operation.SHARPNESS,
    )
    return (
        Choice(Operation.AUTOCONTRAST),
        Choice(Operation.EQUALIZE),
        Choice(Operation.INVERT),
        Choice(Operation.ROTATE, lambda x: 30 * x, signed=True),
        Choice(Operation.POSTERIZE, bits),
        Choice(Operation.SOLARIZE, threshold),
        Choice(Operation.SOLARIZE_ADD, lambda x: np.minimum(128, np.trunc(110 * x))),
        *(Choice(operation, blend, signed=increasing) for operation in blends),
        Choice(Operation.SHEAR_X, lambda x: 0.3 * x, signed=True),
        Choice(Operation.SHEAR_Y, lambda x: 0.3 * x, signed=True),
        Choice(Operation.TRANSLATE_X, lambda x: 0.45 * width * x, signed=True),
        Choice(Operation.TRANSLATE_Y, lambda x: 0.45 * height * x, signed=True),
    )
