"""Parameters of a group of an optimizer as PyTorch's fused kernels take them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Flags:
    """What the caller has set on the optimizer before the step, () tensors, or None: TrainStep sets
    `found_inf`, a GradScaler both."""

    found_inf: Tensor | None
    grad_scale: Tensor | None

    @staticmethod
    def of(optimizer, device: torch.device) -> Flags:
        found_inf = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
        return Flags(
            None if found_inf is None else found_inf.to(device, non_blocking=True),
            None if scale is None else scale.to(device, non_blocking=True),
        )

    @functools.cached_property
    def left_out(self) -> Tensor | None:
        """() bool: the step must change nothing."""
        return None if self.found_inf is None else self.found_inf > 0


class Parameters:
    """Parameters of one group, on one device.

    Attributes:
        views: indices of the parameters that do not `fit`.
        dense: the tensors that the kernels update: the parameters, or contiguous copies of those in
            `views`.
    """

    def __init__(self, group: dict, parameters: list[Tensor]):
        self.group, self.parameters, self.device = group, parameters, parameters[0].device
        self.views = [index for index, p in enumerate(parameters) if not self.fits(p)]
        self.dense = list(parameters)
        for index in self.views:
            self.dense[index] = parameters[index].clone(memory_format=torch.contiguous_format)

    def fits(self, parameter: Tensor) -> bool:
        """Whether the kernels take the parameter as it lies in memory: they assume dense tensors,
        and would overwrite the elements in between."""
        return is_dense(parameter)

    def buffers(self, state: dict, name: str) -> list[Tensor]:
        """The state `name` of each parameter, zero at first, in the memory order of `dense`."""
        for parameter, dense in zip(self.parameters, self.dense, strict=True):
            buffer = state[parameter].get(name)
            if buffer is None:
                state[parameter][name] = torch.zeros_like(dense)
            elif buffer.stride() != dense.stride():
                state[parameter][name] = torch.empty_like(dense).copy_(buffer)
        return [state[parameter][name] for parameter in self.parameters]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters]

    def make_dense(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients in the memory layout of `dense`, for the fused kernels. Also copies
        parameters in `views` into `dense`."""
        gradients = list(gradients)
        for index in self.views:
            self.dense[index].copy_(self.parameters[index])
            gradients[index] = gradients[index].contiguous()
        return gradients

    def write_views(self) -> None:
        """Copies what the kernel has made of `dense` into the parameters in `views`."""
        for index in self.views:
            self.parameters[index].copy_(self.dense[index])


def is_dense(parameter: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps, in any order of the axes."""
    size = 1
    for stride, length in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if length != 1 and stride != size:
            return parameter.numel() == 0
        size *= length
    return True


def is_expanded(parameter: Tensor) -> bool:
    """Whether several elements share memory, by the check that PyTorch makes before writing."""
    strides = zip(parameter.stride(), parameter.shape, strict=True)
    return parameter.numel() > 0 and any(s == 0 and length > 1 for s, length in strides)
