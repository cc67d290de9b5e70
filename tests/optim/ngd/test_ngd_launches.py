"""How many kernels a step of NGD launches on a GPU, counted on a fake one."""

from collections import Counter

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer
from utils.optim.ngd.batch import EARLY_UPDATES
from utils.optim.ngd.optimizer import NGD

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


def transformer() -> nn.Module:
    return Transformer(1000, 4, layers=6, dim=512, heads=8, ffn=2048, max_len=128, dropout=0.0)


def on_the_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), device=CUDA)


@pytest.mark.parametrize(
    ("make", "most", "most_with_update"),
    [(resnet50, 300, 2000), (transformer, 80, 800)],
    ids=["resnet50", "transformer"],
)
def test_launches_of_a_step(make, most, most_with_update):
    groups = build_optimizer("ngd", make(), lr=0.02, weight_decay=0.05).param_groups
    with fake_cuda():
        for group in groups:
            group["params"] = [nn.Parameter(on_the_gpu(p)) for p in group["params"]]
            for parameter in group["params"]:
                parameter.grad = on_the_gpu(parameter)
        optimizer = NGD(groups)
        optimizer.found_inf = torch.zeros((), device=CUDA)
        counted = []
        for step in range(EARLY_UPDATES + 7):
            with Launches() as launches:
                optimizer.step()
            if step >= EARLY_UPDATES:
                counted.append(launches.counts.total())
    assert min(counted) <= most
    assert max(counted) <= most_with_update
