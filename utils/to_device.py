"""What was drawn on the host, on its way to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # reading processes do without PyTorch
    import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array there; the host does not wait for it."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
