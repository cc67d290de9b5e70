"""Meta-mixup over ranks and micro-batches: the policy and the losses of one process that has the
whole step at once."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from utils.augment.meta_mixup import ModelTensors, PolicyMixup, VirtualStep, summed
from utils.augment.mixup import Mixing
from utils.augment.mixup_policy import MixupPolicy
from utils.exchange import Exchange
from utils.models.transformer import Transformer
from utils.packed import pack
from utils.training.objective import mixed_cross_entropy

CPU = torch.device("cpu")
SAMPLES, CLASSES, STEPS, LR = 16, 3, 20, 0.1
# (ranks, micro-batches of each)
LAYOUTS = ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1))


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


def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


def transformer(mixup_at):
    return Transformer(
        40, CLASSES, layers=2, dim=16, heads=2, ffn=24, max_len=8, dropout=0.0, mixup_at=mixup_at
    )


CASES = {
    "pictures": (pictures, network),
    "sentences": (texts, lambda: transformer("sentence")),
    "embeddings": (texts, lambda: transformer("embeddings")),
}


# ---- a run --------------------------------------------------------------------------------------


def train(
    exchange, case, micro=1, dtype=torch.float32, exact=False, clean=8, poisoned=None, tensors=None
):
    """STEPS steps of gradient descent with an update of the policy in each: the mean loss of every
    step, and the policy after it as [shared, *pair].

    Args:
        micro: micro-batches of a step, on every rank.
        clean: samples of the clean batch, and pairs that are looked at.
        poisoned: (step, rank) at which a clean sample is not a number.
        tensors: model -> (module, ModelTensors) for the virtual step.
    """
    data, make = CASES[case]
    targets, inputs_at = data(dtype)
    torch.manual_seed(1)
    model = make().to(dtype)
    module, source = (model, None) if tensors is None else tensors(model)
    virtual = VirtualStep(
        module, mixed_cross_entropy, exact=exact, exchange=exchange, tensors=source
    )
    policy = MixupPolicy(CLASSES, 0.5, lr=0.05, decay=0.1).to(dtype)
    meta = PolicyMixup(policy, virtual)
    mixing = Mixing(alpha=0.5, block=4, per_sample=True, learned="policy", clean=clean)
    losses, policies = [], []
    for step in range(STEPS):
        first = SAMPLES * step % 64
        draws = mixing.draw(SAMPLES, 0, step, np.random.default_rng([3, step]))
        size = SAMPLES // (exchange.size * micro)
        own = np.arange(64, 64 + draws.clean)[share(draws.clean, exchange)] + step
        loss_sum = torch.zeros((), dtype=dtype)
        for index in range(micro):
            start = (exchange.rank * micro + index) * size
            drawn, places = draws.slice(slice(start, start + size)), np.arange(start, start + size)
            batch = SimpleNamespace(
                inputs=inputs_at(first + places), targets=targets[first + places],
                mixing=drawn.plan(targets[first + places]), step_samples=SAMPLES,
                clean=(inputs_at(own), targets[own]) if index == micro - 1 else None,
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
            parameters, summed(exchange, [p.grad for p in parameters]), strict=True
        ):
            parameter.grad = total
        meta.update(torch.tensor(False), LR)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= LR * parameter.grad
                parameter.grad = None
        losses.append(exchange.sum(loss_sum).item() / SAMPLES)
        policies.append([policy.shared.item(), *policy.pair.flatten().tolist()])
    return torch.tensor(losses).double(), torch.tensor(policies, dtype=torch.float64)


def share(n: int, exchange) -> slice:
    return slice(n * exchange.rank // exchange.size, n * (exchange.rank + 1) // exchange.size)


def difference(one, other) -> float:
    return (one - other).abs().max().item()


# ---- what it equals -----------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_ranks_and_micro_batches_are_one_batch(worlds, case, dtype, exact):
    losses, policies = train(Exchange(), case, 1, dtype, exact)
    assert (policies[-1] != policies[0]).sum() > CLASSES  # it learns
    for size, micro in LAYOUTS:
        found = worlds(size).run(train, case, micro, dtype, exact)
        for other in found:
            assert torch.equal(other[1], found[0][1])
        print(case, dtype, exact, size, micro, difference(found[0][0], losses), difference(found[0][1], policies))
