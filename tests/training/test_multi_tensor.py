"""After the backward pass a deep model takes as many calls as a shallow one."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.optim.factory import build_optimizer
from utils.training.average import Average
from utils.training.guard import Guard


class Calls(TorchDispatchMode):
    """Counts the operations of PyTorch."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls(function) -> Counter:
    with Calls() as counted:
        function()
    return counted.found


def network(layers: int, device="cpu") -> nn.Module:
    """A network with gradients."""
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(layers)]
    model = nn.Sequential(*parts).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def optimizer_step(model, name):
    optimizer = build_optimizer(name, model, lr=0.1, weight_decay=0.1)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()  # creates its state
    return optimizer.step


def clipping(model):
    guard = Guard(model)
    return lambda: torch.nn.utils.clip_grads_with_norm_(
        guard.parameters, 1.0, guard.gradient_norm()
    )


def guarding(model):
    guard, bad = Guard(model), torch.tensor(False)
    return lambda: (guard.remember(), guard.take_back(bad))


def averaging(model):
    device = next(model.parameters()).device
    average, bad = Average(model, 0.9), torch.zeros((), dtype=torch.bool, device=device)
    return lambda: average.update(3, bad)


@pytest.mark.parametrize(
    ("make", "device", "most"),
    [
        (lambda model: optimizer_step(model, "sgd"), "cpu", 4),
        (lambda model: optimizer_step(model, "adamw"), "cpu", 8),
        (clipping, "cpu", 8),
        (guarding, "cpu", 4),
        (averaging, "cpu", 6),
        (averaging, "meta", 6),  # by selection, as on a GPU
    ],
    ids=["sgd", "adamw", "clip", "guard", "average", "average on a GPU"],
)
def test_the_calls_do_not_grow_with_the_model(make, device, most):
    shallow, deep = (calls(make(network(layers, device))) for layers in (2, 9))
    assert shallow == deep
    assert 0 < sum(deep.values()) <= most
