"""Weights cast together, against autocast's own casts."""

import pytest
import torch
import torch.nn.functional as F

from utils.fused.cast import autocast_together


def test_it_equals_autocast():
    """Values, gradients and second derivatives; what is frozen gets no gradient."""
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    weight, bias = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    frozen = torch.randn(3)
    results = []
    for together in (False, True):
        given = weight, bias, frozen
        with torch.autocast("cpu", torch.bfloat16):
            w, b, c = autocast_together(*given) if together else given
            y = F.linear(F.linear(x, w, b).tanh() @ w, w, c).float().square().sum()
        first = torch.autograd.grad(y, (weight, bias), create_graph=True)
        second = torch.autograd.grad(first[0].sum() + first[1].sum(), (weight, bias))
        results.append([y, *first, *second])
        assert [t.requires_grad for t in (w, b, c)] == [True, True, False]
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_cast_where_autocast_would_not(dtype):
    weights = torch.randn(2, dtype=dtype), torch.randn(3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float64):
        assert all(a is b for a, b in zip(weights, autocast_together(*weights), strict=True))
