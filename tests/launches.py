"""Counts what a step of an optimizer launches on a GPU, on a fake one (fake_cuda.py)."""

from collections import Counter

import torch
from fake_cuda import CUDA, fake_cuda
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer

# Operations that launch nothing, besides views.
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"}
NOTHING |= {"promote_types"}


class Launches(TorchDispatchMode):
    """Counts the operations that compute something, and as `calls` all, views included, which each
    cost the host time."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls += func.namespace == "aten"
        if not func.is_view and func.namespace == "aten" and name not in NOTHING:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def resnet50() -> nn.Module:
    """Without values, which no launch depends on."""
    with torch.device("meta"):
        return ResNet(50, 10).to(memory_format=torch.channels_last)


def on_the_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), device=CUDA)


def launches_of_a_step(name: str, model: nn.Module | None = None, **settings) -> Counter[str]:
    """What the second step of the optimizer `name` launches, by operation. `model`: default a
    ResNet-50."""
    settings = {"lr": 0.02, "weight_decay": 0.05} | settings
    optimizer = build_optimizer(name, model or resnet50(), **settings)
    with fake_cuda():
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(on_the_gpu(p)) for p in group["params"]]
            for parameter in group["params"]:
                parameter.grad = on_the_gpu(parameter)
        optimizer.found_inf = torch.zeros((), device=CUDA)
        optimizer.step()
        with Launches() as launches:
            optimizer.step()
    return launches.counts
