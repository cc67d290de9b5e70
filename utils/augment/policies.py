"""Which operations each picture gets, with which arguments, and how they are carried out for a
whole batch.

A policy draws on the host, for all samples of an epoch at once. So the host knows which sample gets
which operation, and the device is never asked.

Libraries draw for a whole batch at once what each sample should draw for itself: kornia's
RandAugment the operations, torchvision's also their arguments.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..to_device import to_device
from .chain import Augmentation

if TYPE_CHECKING:
    from torch import Tensor


class Operation(enum.IntEnum):
    """Of utils/augment/operations.py, with what its argument is."""

    NONE = 0
    SHEAR_X = enum.auto()  # tangent
    SHEAR_Y = enum.auto()
    TRANSLATE_X = enum.auto()  # pixels
    TRANSLATE_Y = enum.auto()
    ROTATE = enum.auto()  # degrees
    BRIGHTNESS = enum.auto()  # factor
    CONTRAST = enum.auto()
    SATURATION = enum.auto()
    SHARPNESS = enum.auto()
    HUE = enum.auto()  # turns
    POSTERIZE = enum.auto()  # bits that are kept
    SOLARIZE = enum.auto()  # threshold
    SOLARIZE_ADD = enum.auto()  # addend
    INVERT = enum.auto()
    AUTOCONTRAST = enum.auto()
    EQUALIZE = enum.auto()
    BLUR = enum.auto()  # standard deviation in pixels


class OperationPlan(NamedTuple):
    """For each of n samples the operations that it gets, in order."""

    operations: np.ndarray  # (n, stages) int8, of Operation
    arguments: np.ndarray  # (n, stages) float64


def _nothing(level: np.ndarray) -> np.ndarray:
    return np.zeros_like(level)


class Choice(NamedTuple):
    """An operation of a policy.

    Args:
        argument: of a level, an array of 0 to 1 (more where a policy allows it).
        signed: half of the levels are negated before.
    """

    operation: Operation
    argument: Callable[[np.ndarray], np.ndarray] = _nothing
    signed: bool = False


@dataclass(frozen=True)
class OneOf:
    """In each stage one of the choices, all equally likely.

    Args:
        stages: operations that a picture gets.
        probability: that an operation is carried out.
        level: the level of each.
        deviation: standard deviation of normally distributed levels; infinite: levels are uniform
            from 0 to `level`.
        most: levels are cut off here.
        bins: levels are one of so many, from 0 to 1, with equal probability; 0: they are not.
    """

    choices: tuple[Choice, ...]
    stages: int = 1
    probability: float = 1.0
    level: float = 1.0
    deviation: float = 0.0
    most: float = 1.0
    bins: int = 0

    def draw(self, n: int, generator: np.random.Generator) -> OperationPlan:
        """A plan for n samples."""
        plan = OperationPlan(np.zeros((n, self.stages), np.int8), np.zeros((n, self.stages)))
        for stage in range(self.stages):
            chosen = generator.integers(0, len(self.choices), n)
            happens = generator.random(n) < self.probability
            level, negated = self._levels(n, generator), generator.random(n) < 0.5
            for number, choice in enumerate(self.choices):
                here = np.flatnonzero(happens & (chosen == number))
                levels = np.where(negated[here] & choice.signed, -level[here], level[here])
                plan.operations[here, stage] = choice.operation
                plan.arguments[here, stage] = choice.argument(levels)
        return plan

    def _levels(self, n: int, generator: np.random.Generator) -> np.ndarray:
        if self.bins:
            return generator.integers(0, self.bins, n) / (self.bins - 1)
        if math.isinf(self.deviation):
            level = self.level * generator.random(n)
        else:
            level = self.level + self.deviation * generator.standard_normal(n)
        return np.clip(level, 0, self.most)


class Step(NamedTuple):
    """An operation of a pair in AutoAugment.

    Args:
        probability: that it is carried out.
    """

    choice: Choice
    probability: float
    level: float


@dataclass(frozen=True)
class OneOfPairs:
    """One of the pairs of operations, all equally likely, as in AutoAugment."""

    pairs: tuple[tuple[Step, Step], ...]

    def draw(self, n: int, generator: np.random.Generator) -> OperationPlan:
        """A plan for n samples."""
        plan = OperationPlan(np.zeros((n, 2), np.int8), np.zeros((n, 2)))
        chosen = generator.integers(0, len(self.pairs), n)
        for stage in range(2):
            happens, negated = generator.random(n), generator.random(n) < 0.5
            for number, pair in enumerate(self.pairs):
                choice, probability, level = pair[stage]
                here = np.flatnonzero((chosen == number) & (happens < probability))
                levels = np.where(negated[here] & choice.signed, -level, level)
                plan.operations[here, stage] = choice.operation
                plan.arguments[here, stage] = choice.argument(levels)
        return plan


@dataclass(frozen=True)
class ColourJitter:
    """Brightness, contrast, saturation and hue in random order, each by a random factor, as
    torchvision's ColorJitter does.

    Args:
        strengths: v of each: factors are uniform from max(0, 1 - v) to 1 + v, and hue moves by up
            to v turns (at most 0.5). Those with 0 are left out.
    """

    strengths: tuple[float, float, float, float]

    def draw(self, n: int, generator: np.random.Generator) -> OperationPlan:
        """A plan for n samples."""
        names = Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE
        used = [i for i, strength in enumerate(self.strengths) if strength]
        order = generator.random((n, len(used))).argsort(1)  # (n, stages)
        arguments = np.empty((n, len(used)))
        for place, i in enumerate(used):
            strength, middle = self.strengths[i], 0 if names[i] == Operation.HUE else 1
            low = -strength if names[i] == Operation.HUE else max(0, 1 - strength)
            arguments[:, place] = low + (middle + strength - low) * generator.random(n)
        operations = np.array([names[i] for i in used], np.int8)
        return OperationPlan(operations[order], np.take_along_axis(arguments, order, 1))


Policy = OneOf | OneOfPairs | ColourJitter


class Operations(Augmentation):
    """The operations of several policies, one policy after the other.

    Args:
        policies: draw them.
        fill: colour of pixels from outside the picture, 0 to 255 per channel; None: black.
    """

    def __init__(self, policies: Sequence[Policy], fill: Sequence[float] | None = None):
        self.policies = policies
        self.fill = None if fill is None else np.asarray(fill, np.float32)

    def draw(self, n: int, generator: np.random.Generator) -> OperationPlan:
        plans = [policy.draw(n, generator) for policy in self.policies]
        return OperationPlan(*(np.concatenate(parts, 1) for parts in zip(*plans, strict=True)))

    def apply(self, images: Tensor, plan: OperationPlan, index: np.ndarray | None = None) -> Tensor:
        """(n, height, width, channels) uint8, new, on the device of `images`.

        In each stage the samples are sorted by what they get, and those with the same operation are
        changed together. The host has drawn it, and so knows the order: nothing waits for the
        device. The operations that move pixels are one affine transformation, and those that look
        at one value at a time one table for each sample.
        """
        assert index is None  # it follows one that gathers
        import torch

        if not len(images):
            return images
        groups = self._groups()
        group_of = np.zeros(len(Operation), np.int64)
        for number, (members, _) in enumerate(groups):
            group_of[members] = number
        pixels = images.permute(0, 3, 1, 2).contiguous()
        sample = np.arange(len(images))  # which one is at each place of `pixels`
        for stage in range(plan.operations.shape[1]):
            order = group_of[plan.operations[sample, stage]].argsort(kind="stable")
            sample = sample[order]
            pixels = pixels.index_select(0, to_device(order, images.device))
            operations, arguments = plan.operations[sample, stage], plan.arguments[sample, stage]
            ends = np.bincount(group_of[operations], minlength=len(groups)).cumsum().tolist()
            pieces = [slice(*piece) for piece in zip([0, *ends], ends, strict=False)]
            pixels = torch.cat(
                [
                    change(pixels[piece], operations[piece], arguments[piece])
                    for piece, (_, change) in zip(pieces, groups, strict=True)
                    if piece.start < piece.stop
                ]
            )
        pixels = pixels.index_select(0, to_device(sample.argsort(), images.device))
        return torch.stack(pixels.unbind(1), 3)

    def _groups(self) -> list[tuple[list[Operation], Callable]]:
        """What is carried out together: operations, and a function of (n, channels, height, width)
        uint8 and of operations and arguments (n,), the operation and argument of each sample."""
        from . import operations as ops

        def look_up(images, operations, arguments):
            tables = _for_each(ops.TABLES, operations, arguments)
            return ops.look_up(images, to_device(tables, images.device))

        def warp(images, operations, arguments):
            size = images.shape[2:]
            matrices = ops.grid_matrices(_for_each(ops.WARPS, operations, arguments, *size), *size)
            fill = None if self.fill is None else to_device(self.fill, images.device)
            return ops.warp(images, to_device(matrices, images.device), fill)

        def with_argument(function):
            def change(images, _, arguments):
                return function(images, to_device(arguments.astype(np.float32), images.device))

            return change

        return [
            ([Operation.NONE], lambda images, *_: images),
            ([*ops.TABLES], look_up),
            ([*ops.WARPS], warp),
            ([Operation.CONTRAST], with_argument(ops.adjust_contrast)),
            ([Operation.SATURATION], with_argument(ops.adjust_saturation)),
            ([Operation.SHARPNESS], with_argument(ops.adjust_sharpness)),
            ([Operation.HUE], with_argument(ops.adjust_hue)),
            ([Operation.BLUR], with_argument(ops.gaussian_blur)),
            ([Operation.AUTOCONTRAST], lambda images, *_: ops.autocontrast(images)),
            ([Operation.EQUALIZE], lambda images, *_: ops.equalize(images)),
        ]


def _for_each(functions: dict, operations: np.ndarray, arguments: np.ndarray, *more) -> np.ndarray:
    """(n, ...): for each sample what the function of its operation gives for its argument."""
    results: Any = None
    for operation in np.unique(operations).tolist():
        here = operations == operation
        found = functions[operation](arguments[here], *more)
        if results is None:
            results = np.empty((len(operations), *found.shape[1:]), found.dtype)
        results[here] = found
    return results
