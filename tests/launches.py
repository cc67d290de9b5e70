"""Counts what a step of an optimizer launches on a GPU, on a fake one (fake_cuda.py)."""

from collections import Counter

import torch
from fake_cuda import CUDA
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.models.resnet import ResNet

# Operations that launch nothing, besides views.
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"}


class Launches(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and func.namespace == "aten" and name not in NOTHING:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def resnet50() -> nn.Module:
    return ResNet(50, 10).to(memory_format=torch.channels_last)


def on_the_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), device=CUDA)
