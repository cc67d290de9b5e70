"""Carries out what policies (policies.py) have drawn, for a whole batch at once.

In each stage the samples are sorted by what they get, and those with the same operation are
changed together. The host has drawn it, and so knows the order: nothing waits for the device. The
operations that move pixels are one affine transformation, and those that look at one value at a
time one table for each sample.

Libraries draw for a whole batch at once what each sample should draw for itself: kornia's
RandAugment the operations, torchvision's also their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from utils.augment.policies import Operation, OperationPlan
from utils.to_device import to_device

if TYPE_CHECKING:
    from torch import Tensor


class DrawsOperations(Protocol):
    """OneOf or ColourJitter (see policies.py)."""

    def draw(self, n: int, generator: np.random.Generator) -> OperationPlan: ...


class Operations:
    """The operations of several policies, one policy after the other.

    Args:
        policies: draw them.
        fill: colour of pixels from outside the picture, 0 to 255 per channel; None: black.
    """

    def __init__(self, policies: Sequence[DrawsOperations], fill: Sequence[float] | None = None):
        self.policies = policies
        self.fill = None if fill is None else np.asarray(fill, np.float32)

    def draw(self, n: int, generator: np.random.Generator) -> OperationPlan:
        """A plan for n samples."""
        plans = [policy.draw(n, generator) for policy in self.policies]
        return OperationPlan(*(np.concatenate(parts, 1) for parts in zip(*plans, strict=True)))

    def apply(self, images: Tensor, plan: OperationPlan) -> Tensor:
        """(n, height, width, channels) uint8, new.

        Args:
            images: likewise, on any device.
            plan: for n samples.
        """
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
        from utils.augment import operations as ops

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
