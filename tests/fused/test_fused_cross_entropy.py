"""Fused cross-entropy with mixed targets against the plain one."""

import pytest
import torch
from torch import nn

from benchmarks.fused import bytes_kept
from utils.fused.cross_entropy import fused_cross_entropy
from utils.training.objective import Classification, Precision, mixed_cross_entropy


def batch(n=7, classes=5, dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(n, classes, generator=generator)
    targets = torch.randint(0, classes, (2, n), generator=generator)
    targets[1, 0] = targets[0, 0]
    lam = torch.rand(n, generator=generator)
    return logits.to(dtype).requires_grad_(), *targets, lam


LAMS = {"sample": lambda lam: lam, "batch": lambda lam: lam[:1].expand_as(lam),
        "alone": torch.ones_like, "one number": lambda lam: lam[0]}  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("lam", LAMS)
def test_gradients_equal_finite_differences(lam, smoothing):
    logits, own, other, drawn = batch(dtype=torch.float64)

    def call(logits):
        return fused_cross_entropy(logits, own, other, LAMS[lam](drawn.double()), smoothing)

    assert torch.autograd.gradcheck(call, (logits,))


@pytest.mark.parametrize("scale", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lam", LAMS)
def test_it_equals_the_plain_one(lam, smoothing, scale):
    logits, own, other, drawn = batch(scale=scale)
    results = []
    for losses in (mixed_cross_entropy, fused_cross_entropy):
        loss = losses(logits, own, other, LAMS[lam](drawn), smoothing)
        (gradient,) = torch.autograd.grad((loss * torch.arange(7.0)).sum(), logits)
        results.append((loss, gradient))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float64_as_the_plain_one(dtype):
    """The gradient is as close to float64's as the plain one, with about half the memory."""
    logits, own, other, lam = batch(64, 100, dtype)
    exact = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(mixed_cross_entropy(exact, own, other, lam).sum(), exact)
    errors, kept = [], []
    for losses in (mixed_cross_entropy, fused_cross_entropy):
        loss = losses(logits, own, other, lam, 0.0)
        assert loss.dtype == torch.float32
        errors.append((torch.autograd.grad(loss.sum(), logits)[0].double() - wanted).norm())
        kept.append(bytes_kept(nn.Identity(), lambda _, f=losses: f(logits, own, other, lam)))
    assert errors[1] <= errors[0] * 1.001
    assert kept[1] < 0.55 * kept[0]


def test_no_gradient_of_lambda_and_no_second_derivative():
    logits, own, other, lam = batch()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(
            fused_cross_entropy(logits, own, other, lam).sum(), logits, create_graph=True
        )

    class Mixing:
        partner = torch.arange(7).flip(0)

    objective = Classification(nn.Identity(), Precision("fp32", torch.device("cpu")), fused=True)
    Mixing.lam = lam.requires_grad_()
    objective.losses(logits, own, Mixing).sum().backward()
    assert lam.grad is not None
    Mixing.lam = lam.detach()
    assert "MixedCrossEntropy" in objective.losses(logits, own, Mixing).grad_fn.name()
