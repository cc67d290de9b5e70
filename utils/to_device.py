"""What was made on the host, on its way to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # reading processes do without PyTorch
    import torch


def to_device(data: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`data` there; the host does not wait for it. What is there already, as everything is for
    a CPU, shares the memory of `data`."""
    import torch

    tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
