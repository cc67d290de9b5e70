"""Meta-mixup: lambda moves towards its optimum, and the virtual step has no side effects."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call

from utils.errors import UserError
from utils.mixup.meta import PolicyMixup, SampleMixup, VirtualStep, descend, pairs_of
from utils.mixup.mixing import MixPlan, mix_pairs
from utils.mixup.policy import MixupPolicy
from utils.training.class_balance import ClassBalance
from utils.training.objective import mixed_cross_entropy

GOOD = torch.tensor(False)


def batch_of(inputs, targets, partner, lam, clean, update_pairs):
    """A micro-batch that is a whole step; a policy's update uses the first `update_pairs`."""
    plan = MixPlan(partner, lam, None, True, torch.arange(update_pairs), update_pairs)
    return SimpleNamespace(
        inputs=inputs,
        targets=targets,
        mix_plan=plan,
        clean=clean,
        step_samples=len(targets),
    )


class Toy(nn.Module):
    """Returns weights - inputs, of which half_square is half the squared distance."""

    def __init__(self, width: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(width))

    def forward(self, inputs):
        return self.weights - inputs


def half_square(outputs, targets, partners, lam):
    return outputs.square().sum(1) / 2


BEST, PROBABILITY = 0.8, 0.7


def toy_batch(n=8):
    """Pairs of a (class 0) and b (class 1). A step with learning rate 1 moves the weights to
    lam a + (1 - lam) b; the clean samples are at that point for lam = BEST."""
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 0.0, 2.0])
    inputs = torch.cat([a.expand(n, 3), b.expand(n, 3)])
    targets = torch.arange(2).repeat_interleave(n)
    partner = (torch.arange(2 * n) + n) % (2 * n)
    clean = (BEST * a + (1 - BEST) * b).expand(4, 3), torch.zeros(4, dtype=torch.int64)
    return batch_of(inputs, targets, partner, torch.full((2 * n,), PROBABILITY), clean, n)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("alpha", [0.2, 5.0])
def test_the_policy_finds_the_best_lambda(alpha, exact):
    """lambda at PROBABILITY converges to BEST from either side, with the real weights
    fixed. The parameters of class pairs that do not occur stay 0."""
    model = Toy(3)
    policy = MixupPolicy(3, alpha, lr=0.1)
    meta = PolicyMixup(policy, VirtualStep(model, half_square, exact=exact))
    batch = toy_batch()  # the update uses the pairs (a, b)
    for _ in range(300):
        plan = meta.choose(batch, 1.0)
        inputs = plan.apply(batch.inputs)[:8]
        model.weights.grad = (model.weights - inputs).mean(0).detach()
        meta.update(GOOD, 1.0)
    lam = meta.choose(batch, 1.0).lam
    torch.testing.assert_close(lam, torch.full((16,), BEST), atol=2e-3, rtol=0)
    assert policy.pair[0, 1] != 0 and policy.pair[0, 2] == policy.pair[1, 1] == 0


@pytest.mark.parametrize("exact", [False, True])
def test_samples_move_towards_the_best_lambda(exact):
    batch = toy_batch()
    batch.mix_plan = batch.mix_plan._replace(lam=torch.full((16,), 0.5))
    batch.clean = batch.inputs[:4], batch.targets[:4]  # all a: the more of a, the better
    meta = SampleMixup(VirtualStep(Toy(3), half_square, exact=exact), step=0.1)
    lam = meta.choose(batch, 1.0).lam
    assert ((lam[:8] - 0.6).abs() < 1e-4).all() and ((lam[8:] - 0.4).abs() < 1e-4).all()


def test_descend_takes_a_step_of_a_given_size():
    lam = torch.tensor([0.5, 0.95, 0.0])
    torch.testing.assert_close(
        descend(lam, torch.tensor([1.0, -1.0, 1.0]), 0.1), torch.tensor([0.4, 1.0, 0.0])
    )
    torch.testing.assert_close(
        descend(lam, torch.tensor([1e-30, -1e-30, 1e-30]).double(), 0.1).float(),
        torch.tensor([0.4, 1.0, 0.0]),
    )
    for size in (0.0, float("nan"), float("inf")):
        assert torch.equal(descend(lam, torch.tensor([size, 1.0 if size else 0.0, 0.0]), 0.1), lam)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


def real_batch(n=9, clean=5):
    torch.manual_seed(1)
    inputs, targets = torch.randn(n, 3, 6, 6), torch.randint(0, 4, (n,))
    few = torch.randn(clean, 3, 6, 6), torch.randint(0, 4, (clean,))
    return batch_of(inputs, targets, torch.randperm(n), 0.5 + 0.5 * torch.rand(n), few, 6)


@pytest.mark.parametrize("form", ["policy", "sample"])
@pytest.mark.parametrize("exact", [False, True])
def test_the_virtual_step_has_no_side_effects(form, exact):
    """Weights, BatchNorm's statistics and counter, gradients, modes and random states."""
    model, batch = network(), real_batch()
    virtual = VirtualStep(model, mixed_cross_entropy, exact=exact)
    if form == "policy":
        meta = PolicyMixup(MixupPolicy(4, 0.5, 0.1), virtual)
    else:
        meta = SampleMixup(virtual, 0.1)
    nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
    model[1].eval()

    def state():
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensors |= {f"grad/{name}": p.grad.clone() for name, p in model.named_parameters()}
        tensors |= {"random": torch.get_rng_state(), "inputs": batch.inputs.clone()}
        modes = [module.training for module in model.modules()]
        where = [tensor.data_ptr() for tensor in model.state_dict().values()]
        return tensors, modes, where

    before = state()
    plan = meta.choose(batch, 0.1)
    meta.update(GOOD, 0.1)
    after = state()
    assert before[1:] == after[1:]
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert not plan.lam_pending and plan.lam.shape == (9,) and not plan.lam.requires_grad
    moved = meta.policy.shared.item() != meta.policy.start if form == "policy" else True
    assert moved


def test_dropout_is_the_same_at_both_ends():
    """Only with the same masks at both ends is the fast form close to the exact one."""
    model, batch = network().double(), real_batch()
    batch.inputs = batch.inputs.double()
    clean = batch.clean[0].double(), batch.clean[1]
    pairs, lam = pairs_of(batch), batch.mix_plan.lam.double()
    exact, fast = (
        VirtualStep(model, mixed_cross_entropy, exact=exact).batch_hypergradient(
            pairs, lam, clean, 0.1
        )
        for exact in (True, False)
    )
    assert (fast - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("exact", [False, True])
def test_an_update_steps_along_the_real_gradient(exact):
    """With the gradient of the whole batch it equals `batch_hypergradient`."""
    model, batch = network().eval().double(), real_batch()
    inputs, clean = batch.inputs.double(), (batch.clean[0].double(), batch.clean[1])
    lam = batch.mix_plan.lam.double()
    mixed = MixPlan(batch.mix_plan.partner, lam).apply(inputs)
    partners = batch.targets[batch.mix_plan.partner]
    mixed_cross_entropy(model(mixed), batch.targets, partners, lam).mean().backward()
    batch.inputs = inputs
    virtual = VirtualStep(model, mixed_cross_entropy, exact=exact)
    (known,) = virtual.step_hypergradients([pairs_of(batch)], [lam], 9, clean, 0.1)
    virtual.exact = True
    expected = virtual.batch_hypergradient(pairs_of(batch), lam, clean, 0.1)
    torch.testing.assert_close(known, expected, rtol=1e-9 if exact else 1e-4, atol=1e-9)


@pytest.mark.parametrize("form", [PolicyMixup, SampleMixup])
def test_a_plan_that_is_not_learned_passes_through(form):
    virtual = VirtualStep(network(), mixed_cross_entropy)
    meta = (
        PolicyMixup(MixupPolicy(4, 0.5, 0.1), virtual)
        if form is PolicyMixup
        else SampleMixup(virtual, 0.1)
    )
    batch = real_batch()
    batch.mix_plan = batch.mix_plan._replace(lam_pending=False)
    assert meta.choose(batch, 0.1) is batch.mix_plan
    batch.mix_plan = None
    assert meta.choose(batch, 0.1) is None
    meta.update(GOOD, 0.1)  # without clean samples: does nothing


def test_frozen_weights_take_no_step():
    model, batch = network(), real_batch()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    meta = PolicyMixup(MixupPolicy(4, 0.5, 0.1), VirtualStep(model, mixed_cross_entropy))
    meta.choose(batch, 0.1)
    nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
    meta.update(GOOD, 0.1)
    assert model[0].weight.grad is None and meta.policy.shared.item() != meta.policy.start


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["test_vit", pytest.param("test_resnet", marks=pytest.mark.slow)])
def test_gradient_checkpointing_changes_nothing(name, exact):
    """Nor does it change BatchNorm's statistics, or stay off."""
    model, batch = timm.create_model(name, num_classes=4).double(), real_batch()
    inputs, clean = torch.randn(2, 9, 3, 160, 160, dtype=torch.float64)
    batch.inputs, batch.clean = inputs, (clean[:5], batch.clean[1])
    nn.init.normal_(model.get_classifier().weight)
    nn.functional.cross_entropy(model(inputs), batch.targets).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pairs, lam, found = pairs_of(batch), batch.mix_plan.lam.double(), []
    for checkpointed in (False, True):
        model.set_grad_checkpointing(checkpointed)
        virtual = VirtualStep(model, mixed_cross_entropy, exact=exact, checkpointed=checkpointed)
        of_batch = virtual.batch_hypergradient(pairs, lam, batch.clean, 0.1)
        of_step = virtual.step_hypergradients([pairs], [lam], 9, batch.clean, 0.1)
        found.append(torch.cat([of_batch, *of_step]))
        assert model.grad_checkpointing == checkpointed
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_without_a_second_derivative():
    model, batch = nn.Sequential(network(), nn.Hardsigmoid()), real_batch()
    virtual = VirtualStep(model, mixed_cross_entropy, exact=True)
    with pytest.raises(UserError, match=r"^--meta_exact: .* no second derivative .*leave the flag"):
        virtual.batch_hypergradient(pairs_of(batch), batch.mix_plan.lam, batch.clean, 0.1)


@pytest.mark.parametrize("exact", [False, True])
def test_weights_of_classes(exact):
    """The derivative of the weighted mean, whose divisor depends on lambda, too; the pairs come in
    two pieces. The reference differentiates the whole of it twice."""
    balance = ClassBalance(0.1, torch.tensor([0.2, 1.0, 3.0, 0.5]))
    model, batch = network().eval().double(), real_batch()
    model[2] = nn.Softplus()  # a finite difference has no branches to keep
    batch.inputs, clean = batch.inputs.double(), (batch.clean[0].double(), batch.clean[1])
    targets, partner = batch.targets, batch.mix_plan.partner
    lam = batch.mix_plan.lam.double().requires_grad_()

    def mean(weights, inputs, *labels):
        logits = functional_call(model, weights, (inputs,))
        return balance.losses(logits, *labels).sum() / balance.sample_weights(*labels).sum()

    weights = dict(model.named_parameters())
    mixed = mix_pairs(batch.inputs, batch.inputs[partner], lam)
    loss = mean(weights, mixed, targets, targets[partner], lam)
    gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    stepped = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradient, strict=True)}
    (expected,) = torch.autograd.grad(mean(stepped, *clean), lam)

    for parameter, part in zip(model.parameters(), gradient, strict=True):
        parameter.grad = part.detach()
    virtual = VirtualStep(model, balance.losses, exact=exact, weigh=balance.sample_weights)
    places = torch.arange(9).split(4)
    pieces, lams = [pairs_of(batch, at) for at in places], list(lam.detach().split(4))
    found = torch.cat(virtual.step_hypergradients(pieces, lams, 9, clean, 0.1))
    alone = virtual.batch_hypergradient(pairs_of(batch), lam.detach(), clean, 0.1)
    for known in (found, alone):
        torch.testing.assert_close(known, expected, rtol=1e-7 if exact else 1e-4, atol=1e-9)
