"""Lion against its formula in plain float64, one number at a time."""

import math

import pytest
import torch
from lion import LION


def formula(p, gradients, lr, decay, beta1, beta2) -> float:
    momentum = 0.0
    for g in gradients:
        mixed = beta1 * momentum + (1 - beta1) * g
        p = p - lr * (math.copysign(1.0, mixed) + decay * p)
        momentum = beta2 * momentum + (1 - beta2) * g
    return p


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.99), (0.5, 0.8), (0.0, 0.0)])
def test_equals_its_formula(decay, beta1, beta2):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    gradients = torch.randn(20, 7, 3, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    groups = [{"params": [weight], "weight_decay": decay}]
    optimizer = LION.make(groups, lr=0.01, momentum=beta1, lion_beta2=beta2)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = [
        formula(p, gradients.view(20, -1)[:, i].tolist(), 0.01, decay, beta1, beta2)
        for i, p in enumerate(start.flatten().tolist())
    ]
    expected = torch.tensor(expected, dtype=torch.float64).view(7, 3)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-14)


def test_a_flagged_step_leaves_no_trace():
    weight = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [weight], "weight_decay": 0.1}]
    optimizer = LION.make(groups, lr=0.1, momentum=0.9)
    weight.grad = torch.full((3,), math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert weight.tolist() == [1.0] * 3 and not optimizer.state
    weight.grad, optimizer.found_inf = torch.ones(3), torch.zeros(())
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.89))
