"""Meta-mixup over ranks and micro-batches: policy and losses are those of one process that has the
whole step at once."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from utils.distributed.sync_batch_norm import sync_batch_norms
from utils.exchange import Exchange
from utils.mixup.meta import PolicyMixup, VirtualStep, sum_over_ranks
from utils.mixup.mixing import Mixing
from utils.mixup.policy import MixupPolicy
from utils.model_tensors import ModelTensors
from utils.models.transformer import Transformer
from utils.packed import pack
from utils.training.objective import mixed_cross_entropy

CPU = torch.device("cpu")
SAMPLES, CLASSES, STEPS, LR = 16, 3, 8, 0.1
# (ranks, micro-batches of each)
LAYOUTS = ((1, 4), (2, 2), (4, 1))


# ---- data and models ----------------------------------------------------------------------------


def pictures(dtype, size=96):
    """(samples, targets, places -> inputs)."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(size) % CLASSES
    images = torch.randn(size, 3, 6, 6, generator=generator) + 0.4 * targets[:, None, None, None]
    images = images.to(dtype)
    return targets, lambda places: images[places]


def texts(dtype, size=96):
    rng = np.random.default_rng(0)
    targets = torch.arange(size) % CLASSES
    lengths = rng.integers(2, 9, size)
    starts = np.cumsum(lengths) - lengths
    tokens = rng.integers(1, 12, lengths.sum()) + 12 * np.repeat(targets.numpy(), lengths)
    return targets, lambda places: pack(tokens, starts[places], lengths[places], CPU)


def network(exchange=None):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


def normalised(exchange):
    """With BatchNorm over all ranks."""
    model = network()
    model.insert(1, nn.BatchNorm2d(6))
    sync_batch_norms(model, exchange)
    return model


def transformer(mixup_at):
    model = Transformer(
        40, CLASSES, layers=2, dim=16, heads=2, ffn=24, max_len=8, dropout=0.0, mixup_at=mixup_at
    )
    with torch.no_grad():  # at its initial values lambda would hardly matter
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 8
    return model


CASES = {
    "pictures": (pictures, network),
    "BatchNorm": (pictures, normalised),
    "sentences": (texts, lambda exchange: transformer("sentence")),
    "embeddings": (texts, lambda exchange: transformer("embeddings")),
}


# ---- a run --------------------------------------------------------------------------------------


def train(
    exchange, case, micro=1, dtype=torch.float64, exact=False, clean=8, every=1, poisoned=None,
    elsewhere=False,
):  # fmt: skip
    """STEPS steps of gradient descent: the mean loss of every step, and the policy after it as
    [shared, *pair].

    Args:
        micro: micro-batches of a step, on every rank.
        clean: samples of the clean batch, and pairs that are looked at.
        every: steps between two updates of the policy.
        poisoned: (step, rank) at which a clean sample is not a number.
        elsewhere: the virtual step has a copy of the model on the meta device.
    """
    data, make = CASES[case]
    targets, inputs_at = data(dtype)
    torch.manual_seed(1)
    model = make(exchange).to(dtype)
    module = copy.deepcopy(model).to("meta") if elsewhere else model
    virtual = VirtualStep(
        module, mixed_cross_entropy, exact=exact, exchange=exchange, tensors=ModelTensors(model)
    )
    policy = MixupPolicy(CLASSES, 0.5, lr=0.05, decay=0.1).to(dtype)
    meta = PolicyMixup(policy, virtual)
    mixing = Mixing(
        alpha=0.5,
        block=4,
        per_sample=True,
        meta_form="policy",
        clean_samples=clean,
        update_every=every,
    )
    losses, policies = [], []
    for step in range(STEPS):
        first = SAMPLES * step % 64
        draws = mixing.draw(SAMPLES, 0, step, np.random.default_rng([3, step]))
        size = SAMPLES // (exchange.size * micro)
        own = np.arange(64, 64 + draws.clean_samples)[share(draws.clean_samples, exchange)] + step
        loss_sum, last = torch.zeros((), dtype=dtype), micro - 1
        for index in range(micro):
            start = (exchange.rank * micro + index) * size
            drawn, places = draws.slice(slice(start, start + size)), np.arange(start, start + size)
            has_clean = draws.clean_samples and index == last
            batch = SimpleNamespace(
                inputs=inputs_at(first + places), targets=targets[first + places],
                mix_plan=drawn.plan(targets[first + places]), step_samples=SAMPLES,
                clean=(inputs_at(own), targets[own]) if has_clean else None,
            )  # fmt: skip
            if poisoned == (step, exchange.rank) and batch.clean is not None:
                batch.clean[0][-1].fill_(torch.nan)
            plan = meta.choose(batch, LR)
            plan = plan._replace(lam=plan.lam.to(dtype))
            inside = isinstance(model, Transformer)
            logits = model(batch.inputs, plan) if inside else model(plan.apply(batch.inputs))
            partners = batch.targets[plan.partner]
            loss = mixed_cross_entropy(logits, batch.targets, partners, plan.lam).sum()
            (loss / SAMPLES).backward()
            loss_sum += loss.detach()
        parameters = list(model.parameters())
        for parameter, total in zip(
            parameters, sum_over_ranks(exchange, [p.grad for p in parameters]), strict=True
        ):
            parameter.grad = total
        meta.update(torch.tensor(False), LR)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= LR * parameter.grad
                parameter.grad = None
        losses.append(exchange.sum(loss_sum).item() / SAMPLES)
        policies.append([policy.shared.item(), *policy.pair.flatten().tolist()])
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(policies, dtype=torch.float64)


def share(n: int, exchange) -> slice:
    return slice(n * exchange.rank // exchange.size, n * (exchange.rank + 1) // exchange.size)


def difference(one, other) -> tuple[float, float]:
    """The largest differences of the losses and of the policies."""
    return tuple((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def slow(case: str):
    return pytest.param(case, marks=pytest.mark.slow)


def of_rank(exchange, case, micro, options):
    return train(exchange, case, micro, **options)


def check(worlds, case, losses, policies, layouts=LAYOUTS, **options):
    """Asserts that every layout equals one process with the whole step, up to these differences."""
    expected = train(Exchange(), case, **options)
    assert (expected[1][-1] != expected[1][0]).sum() > CLASSES  # the policy does learn
    for size, micro in layouts:
        found = worlds(size).run(of_rank, case, micro, options)
        assert all(torch.equal(other[1], found[0][1]) for other in found)
        differences = difference(found[0], expected)
        assert differences[0] <= losses and differences[1] <= policies, (size, micro, differences)


# ---- what it equals -----------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", ["pictures", slow("embeddings"), slow("sentences")])
def test_ranks_and_micro_batches_are_one_batch(worlds, case, exact):
    losses, policies = (1e-12, 1e-11) if exact else (1e-7, 1e-6)
    check(worlds, case, losses, policies, exact=exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["embeddings", slow("sentences"), slow("pictures")])
def test_in_float32(worlds, case):
    check(worlds, case, 1e-5, 1e-5, ((2, 2), (4, 1)), dtype=torch.float32, exact=True)


@pytest.mark.parametrize("case", ["sentences", slow("embeddings"), "pictures"])
def test_the_fast_form_in_float32(worlds, case):
    """Its finite difference has a rounding error of about a thousandth, which hardly changes the
    losses."""
    check(worlds, case, 1e-4, 5e-4, ((2, 2), (4, 1)), dtype=torch.float32, every=4)


@pytest.mark.slow
def test_with_batch_norm_over_the_ranks(worlds):
    check(worlds, "BatchNorm", 1e-7, 1e-6, ((2, 1), (4, 1)))


@pytest.mark.parametrize("case", [slow(case) if case == "embeddings" else case for case in CASES])
def test_ranks_without_a_pair_or_a_clean_sample(worlds, case):
    check(worlds, case, 1e-7, 1e-6, ((2, 1), (4, 1)), clean=2)


def test_the_model_of_the_virtual_step_may_be_on_the_meta_device(worlds):
    found = worlds(2).run(of_rank, "pictures", 2, {"elsewhere": True})
    expected = worlds(2).run(of_rank, "pictures", 2, {})
    assert all(map(torch.equal, found[0], expected[0]))


def test_a_step_that_is_not_finite_on_one_rank_changes_no_policy(worlds):
    found = worlds(2).run(of_rank, "pictures", 1, {"poisoned": (3, 1)})
    policies = found[0][1]
    assert torch.isfinite(policies).all()
    assert all(torch.equal(policies, other[1]) for other in found)
    moved = [bool((one != other).any()) for one, other in itertools.pairwise(policies)]
    assert moved == [step != 3 for step in range(1, STEPS)]
