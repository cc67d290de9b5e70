"""Batches with fillers, as CUDA graphs need them, give what those without them give."""

import numpy as np
import pytest
import small_encoders
import torch
from small_transformer import CPU, WAYS, model, texts

from utils.mixup.mixing import MixPlan
from utils.models.encoder import Encoder
from utils.packed import pack
from utils.training.class_balance import ClassBalance
from utils.training.objective import Classification, Precision

LENGTHS = np.array([5, 1, 9, 3, 4, 2, 7, 8])
FILLERS = np.array([4, 1, 5])
PLAN = MixPlan(torch.tensor([2, 1, 0, 4, 3, 5, 7, 6]), torch.linspace(0.2, 0.9, 8))
TARGETS = torch.arange(8) % 3


def batches():
    """The same texts without fillers and with them, which are made of other tokens."""
    tokens = np.concatenate(texts([*LENGTHS, *FILLERS]))
    lengths = np.append(LENGTHS, FILLERS)
    starts = np.cumsum(lengths) - lengths
    n = len(LENGTHS)
    filled = pack(tokens, starts, lengths, CPU, longest=12)
    filled = filled._replace(borders=None, fillers=len(FILLERS))
    return pack(tokens, starts[:n], LENGTHS, CPU), filled


def results(network, inputs, plan, **options):
    """Loss, sums and gradients of a pass."""
    objective = Classification(
        network, Precision("fp32", CPU), 0.1, plan is not None, mixes_inside=True, **options
    )
    network.zero_grad()
    loss, sums = objective(inputs, TARGETS, plan)
    loss.backward()
    return [loss.detach(), *sums.values(), *(p.grad for p in network.parameters())]


@pytest.mark.parametrize(("pooling", "at"), WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"plan": None},
        {"plan": PLAN, "clean_accuracy": True},
        {"plan": PLAN, "fused": True},
        {"plan": PLAN, "balance": ClassBalance(0.1, torch.tensor([0.5, 2.0, 1.0]).double(), 1.0)},
    ],
    ids=lambda options: "-".join(options),
)
def test_loss_sums_and_gradients(pooling, at, options):
    network = model(dtype=torch.float64, pooling=pooling, mixup_at=at)
    plain, filled = (results(network, inputs, **options) for inputs in batches())
    for expected, found in zip(plain, filled, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_an_encoder(kind):
    """As a row, and padded."""
    pad = small_encoders.FURTHER[kind].get("pad_token_id", 0)
    network = Encoder(small_encoders.model(kind), 3, max_len=12, pad=pad, end=49).eval()
    with torch.no_grad():
        plain, filled = (network.features(inputs) for inputs in batches())
    torch.testing.assert_close(filled, plain, atol=1e-5, rtol=1e-4)
