"""Copies data from the host to a device without a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # worker processes do not import PyTorch
    import torch


def to_device(data: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`data` as a tensor on the device; the host does not wait. Data that is there already (always,
    for a CPU) is not copied."""
    import torch

    tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
