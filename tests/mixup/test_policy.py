"""MixupPolicy: its distribution, derivatives and updates."""

import math

import numpy as np
import pytest
import torch

from utils.mixup.policy import (
    MAX_LOG_S,
    SAMPLES_PER_PAIR,
    MixupPolicy,
    can_tell_pairs_apart,
    lambda_at,
)

GOOD, BAD = torch.tensor(False), torch.tensor(True)


def policy(alpha=0.5, **options):
    return MixupPolicy(3, alpha, **{"lr": 0.1, **options})


def test_quantiles_in_closed_form():
    """s = 1: uniform; s = 2: squared odds; symmetric about 1/2, increasing in u and s."""
    u = torch.tensor([0.1, 0.25, 0.5, 0.8], dtype=torch.float64)
    torch.testing.assert_close(lambda_at(u, torch.zeros(4)), u)
    expected = u**2 / (u**2 + (1 - u) ** 2)
    torch.testing.assert_close(lambda_at(u, torch.full((4,), math.log(2)).double()), expected)
    log_s = torch.linspace(-3, 3, 4).double()
    torch.testing.assert_close(
        lambda_at(u, log_s) + lambda_at(1 - u, log_s), torch.ones(4).double()
    )
    assert (lambda_at(torch.linspace(0.5, 1, 50), torch.tensor(2.0)).diff() >= 0).all()
    assert (lambda_at(torch.tensor(0.7), torch.linspace(-3, 3, 50)).diff() > 0).all()


def test_tails_are_those_of_beta():
    """For small x, P(lambda < x) is proportional to x^a, as for Beta(a, a)."""
    for alpha in (0.2, 0.5, 1.0, 2.0):
        x = 10 ** torch.tensor([-8 / alpha, -6 / alpha], dtype=torch.float64)
        u = torch.sigmoid(alpha * torch.logit(x))  # the probability whose quantile is x
        torch.testing.assert_close(lambda_at(u, torch.tensor(-math.log(alpha)).double()), x)
        assert math.log(u[1] / u[0]) == pytest.approx(alpha * math.log(x[1] / x[0]), rel=1e-3)


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("log_s", [-MAX_LOG_S, 0.0, MAX_LOG_S])
def test_the_ends_are_finite(probability, log_s):
    log_s = torch.tensor(log_s, requires_grad=True)
    lam = lambda_at(torch.tensor(probability), log_s)
    (slope,) = torch.autograd.grad(lam, log_s)
    assert 0 <= lam <= 1 and torch.isfinite(slope)


def test_derivative_in_closed_form():
    """d lambda / d log_s = lambda (1 - lambda) s logit(u)."""
    one = policy().double()
    targets, partners = torch.tensor([0, 2, 1]), torch.tensor([2, 0, 1])
    u = torch.tensor([0.6, 0.7, 0.9], dtype=torch.float64)
    lam = one(targets, partners, u)
    slope = lam * (1 - lam) * math.exp(one.start) * torch.logit(u)
    weights = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    shared, pair = torch.autograd.grad(lam, (one.shared, one.pair), weights)
    torch.testing.assert_close(shared, (weights * slope).sum())
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 2] = slope[0] + 10 * slope[1]  # the same pair in both orders
    expected[1, 1] = 100 * slope[2]
    torch.testing.assert_close(pair, expected)


def step(one, hypergradient, bad=GOOD, lam_of=(0, 1)):
    targets, partners = torch.tensor([lam_of[0]] * 2), torch.tensor([lam_of[1]] * 2)
    lam = one(targets, partners, torch.tensor([0.6, 0.9]))
    one.update(lam, torch.tensor(hypergradient), bad)


def test_an_update_is_an_adam_step():
    one = policy(lr=0.1)
    reference = torch.tensor([one.start, 0.0], dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([reference], lr=0.1, betas=(0.9, 0.99), eps=1e-12)
    for scale in (1.0, -0.5, 2.0):
        lam = lambda_at(torch.tensor([0.6, 0.9]).double(), reference.sum())
        (gradient,) = torch.autograd.grad(lam, reference, scale * torch.tensor([1.0, 2.0]).double())
        step(one, [scale, 2 * scale])
        reference.grad = gradient
        adam.step()
    np.testing.assert_allclose(one.shared.item(), reference[0].item(), rtol=1e-5)
    np.testing.assert_allclose(one.pair[0, 1].item(), reference[1].item(), rtol=1e-5)
    assert one.pair.count_nonzero() == 1


@pytest.mark.parametrize("how", ["flag", "nan", "inf"])
def test_a_skipped_update_changes_nothing(how):
    one = policy(decay=0.5)
    step(one, [1.0, 1.0])
    before = {name: tensor.clone() for name, tensor in one.saved_tensors().items()}
    wrong = {"flag": 1.0, "nan": math.nan, "inf": math.inf}[how]
    step(one, [1.0, wrong], BAD if how == "flag" else GOOD)
    after = one.saved_tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_decay_goes_back_to_the_start():
    one = policy(decay=2.0)
    with torch.no_grad():
        one.shared += 1
        one.pair[0, 1] = 1.0
    step(one, [0.0, 0.0])
    assert one.shared.item() == pytest.approx(one.start + 0.8)
    assert one.pair[0, 1].item() == pytest.approx(0.8)


def test_shapes_stay_within_limits():
    assert policy(alpha=1e-9).start == MAX_LOG_S and policy(alpha=100).start == -MAX_LOG_S
    one = policy(lr=3.0)
    for _ in range(5):
        step(one, [-1.0, -1.0])
    assert one.shared.item() == MAX_LOG_S and one.pair.max() == MAX_LOG_S


def test_mean_lambda_of_each_pair():
    uniform = policy(alpha=1.0).mean_lambda()
    torch.testing.assert_close(uniform, torch.full((3, 3), 0.75))
    one = policy(alpha=1.0)
    step(one, [-1.0, -1.0], lam_of=(2, 0))
    mean = one.mean_lambda()
    assert torch.equal(mean, mean.T) and mean[0, 2] > mean[0, 1] > 0.75


def test_a_saved_policy_can_be_loaded():
    one, other, fresh = policy(), policy(), policy()
    for scale in (1.0, -2.0):
        step(one, [scale, 1.0])
    other.load_tensors({name: tensor.clone() for name, tensor in one.saved_tensors().items()})
    assert fresh.saved_tensors().keys() == {"shared", "pair"}
    fresh.load_tensors(policy().saved_tensors())
    for both in ([0.3, 1.0], [1.0, -1.0]):
        step(one, both)
        step(other, both)
    for name, tensor in one.saved_tensors().items():
        assert torch.equal(tensor, other.saved_tensors()[name]), name


def test_mean_lambda_has_no_gradient():
    assert not policy().mean_lambda().requires_grad


# ---- whether pairs of classes are told apart ----------------------------------------------------


def test_pairs_are_told_apart_where_each_is_looked_at_often_enough():
    pairs = 10 * 11 // 2
    assert can_tell_pairs_apart(10, samples=pairs, updates=SAMPLES_PER_PAIR, decay=0.0)
    assert not can_tell_pairs_apart(10, samples=pairs, updates=SAMPLES_PER_PAIR - 1, decay=0.0)
    assert not can_tell_pairs_apart(10, samples=pairs, updates=10 * SAMPLES_PER_PAIR, decay=0.1), (
        "it forgets"
    )
    assert can_tell_pairs_apart(2, samples=64, updates=1000, decay=0.01)


def step_of(one: MixupPolicy) -> None:
    targets, partners = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2])
    lam = one(targets, partners, torch.tensor([0.6, 0.7, 0.8]))
    one.update(lam, torch.tensor([1.0, -2.0, 3.0]), GOOD)


def test_without_pairs_the_shared_number_alone_learns_and_just_as_it_did():
    with_pairs, without = policy(), policy(learns_pairs=False)
    for one in (with_pairs, without):
        step_of(one)
    assert with_pairs.pair.any() and not without.pair.any()
    assert torch.equal(with_pairs.shared, without.shared)


def test_a_policy_that_has_learned_about_pairs_goes_on():
    """A run of before --mixup meta asked whether pairs can be told apart."""
    old, resumed, other = policy(), policy(learns_pairs=False), policy(learns_pairs=False)
    step_of(old)
    resumed.load_tensors(old.saved_tensors())
    other.load_tensors(other.saved_tensors())
    assert resumed.learns_pairs and not other.learns_pairs
    for one in (old, resumed):
        step_of(one)
    assert torch.equal(old.pair, resumed.pair)
