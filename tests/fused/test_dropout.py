"""Dropout: rate, mean, gradient, and reproducible draws."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from utils.fused.dropout import Dropout, dropout
from utils.models import transformer
from utils.models.transformer import attend


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.00001])
@pytest.mark.parametrize("shape", [(1000, 301), (1,), (7, 3, 5), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rate_scale_and_gradient(rate, shape, dtype):
    torch.manual_seed(0)
    x = torch.rand(shape, dtype=dtype) + 0.5
    x.requires_grad_()
    y = dropout(x, rate)
    assert y.dtype == dtype and y.shape == x.shape
    kept = y != 0
    real = round(rate * 65536) / 65536
    scale = torch.tensor(1 / (1 - real), dtype=dtype)
    assert torch.equal(y, torch.where(kept, x * scale, 0))
    if x.numel() > 1000:
        spread = (rate * (1 - rate) / x.numel()) ** 0.5
        assert 1 - kept.float().mean().item() == pytest.approx(rate, abs=5 * spread + 1e-5)
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(kept, scale, 0))


def test_elements_are_independent():
    """Even neighbours, which share a 64-bit draw."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(400_000), 0.3) != 0).numpy().astype(np.float64)
    for distance in (1, 2, 3, 4, 5, 8, 64):
        correlation = np.corrcoef(kept[:-distance], kept[distance:])[0, 1]
        assert abs(correlation) < 5 / 400_000**0.5


def test_depends_only_on_the_random_state():
    torch.manual_seed(1)
    x, state = torch.randn(50, 7), torch.get_rng_state()
    once, other = dropout(x, 0.5), dropout(x, 0.5)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x, 0.5), once) and not torch.equal(once, other)


def test_identity_in_evaluation_or_with_rate_0():
    x, module = torch.randn(5, 4), Dropout(0.5)
    assert not torch.equal(module(x), x)
    state = torch.get_rng_state()
    assert module.eval()(x) is x and Dropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("queries", [1, 6])
def test_attention_with_dropout_equals_attention(monkeypatch, masked, queries):
    """Except for the dropped weights."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 2, queries, 4), torch.randn(2, 3, 2, 6, 4)
    keys = torch.arange(6) < torch.tensor([6, 1, 4])[:, None, None, None]
    keys = keys if masked else None
    expected = F.scaled_dot_product_attention(q, k, v, keys)
    mean = sum(attend(q, k, v, keys, 0.2) for _ in range(3000)) / 3000
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.1)
    monkeypatch.setattr(transformer, "dropout", lambda x, rate: x)
    torch.testing.assert_close(attend(q, k, v, keys, 0.2), expected)
