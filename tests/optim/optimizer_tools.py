"""Small models, the optimizers that are tested, and their steps."""

import pytest
import torch
from own_optimizers import OWN
from torch import nn

from utils.optim.factory import build_optimizer
from utils.optim.table import OPTIMIZERS

LR = dict.fromkeys(OPTIMIZERS, 0.01) | {"sgd": 0.1, "ngd": 0.02}
# "lookahead sgd" is Lookahead around sgd.
VARIANTS = [*OWN, *(f"lookahead {name}" for name in OWN)]
K = 3  # of Lookahead
each_optimizer = pytest.mark.parametrize("name", VARIANTS)


def small_model(channels_last=False, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1, bias=False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(dtype=dtype, memory_format=memory_format)


def text_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(9, 6), "bag": nn.EmbeddingBag(5, 6), "hidden": nn.Linear(6, 8),
            "norm": nn.LayerNorm(8), "head": nn.Linear(8, 4),
        }
    )  # fmt: skip


def backward(model: nn.Module, step: int) -> None:
    """New gradients, which depend on weights and step alone."""
    generator = torch.Generator().manual_seed(step)
    parameter = next(model.parameters())
    inputs = torch.randn(5, 3, 7, 7, generator=generator, dtype=parameter.dtype)
    if parameter.is_contiguous(memory_format=torch.channels_last):
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 3, 0])).backward()


def poison(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad.fill_(float("nan") if index % 2 else float("inf"))


def build(name, model, **settings):
    around, _, name = name.rpartition(" ")
    settings = {"lr": LR[name], "weight_decay": 0.1} | settings
    return build_optimizer(name, model, lookahead_k=K if around else None, **settings)


def bits(model, optimizer) -> list[torch.Tensor]:
    """Copies of all parameters and of their state, in a fixed order."""
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        tensors += [torch.as_tensor(state[key]).clone() for key in sorted(state)]
    return tensors


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
