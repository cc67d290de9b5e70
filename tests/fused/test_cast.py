"""Weights cast together, against autocast's own casts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.fused.cast import autocast_together


def test_it_equals_autocast():
    """Values, gradients and second derivatives."""
    torch.manual_seed(0)
    x, layers = torch.randn(5, 4), (nn.Linear(4, 3), nn.Linear(3, 3))
    parameters, results = [p for layer in layers for p in layer.parameters()], []
    for together in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            w1, b1, w2, b2 = autocast_together(*layers) if together else parameters
            y = F.linear(F.linear(x, w1, b1).tanh(), w2, b2).float().square().sum()
        first = torch.autograd.grad(y, parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        results.append([y, *first, *second])
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_cast_where_autocast_would_not(dtype):
    layer = nn.Linear(2, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float64):
        weight, bias = autocast_together(layer)
    assert weight is layer.weight and bias is layer.bias
