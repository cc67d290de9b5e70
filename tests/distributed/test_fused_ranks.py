"""Fused models over ranks against plain ones."""

import functools

import pytest
import torch
import torch.nn.functional as F
from fused.fused_tools import assert_close

from utils.distributed.strategies.base import build_strategy
from utils.distributed.sync_batch_norm import sync_batch_norms
from utils.fused import fuse
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer

# Rounding decides the sign of a ReLU's input that happens to be near zero, and with it a whole
# element of the gradient: in float32 1e-8 of 70,000 such inputs once moved weights by 3e-4. In
# float64 none comes that near.
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def network(texts: bool, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if texts:
        return Transformer(30, 3, 2, 16, 2, 16, 12).to(dtype)
    return ResNet(18, 3, 4, drop_path=0.2).to(dtype, memory_format=torch.channels_last)


def batch(texts: bool, dtype: torch.dtype) -> torch.Tensor:
    if texts:
        return torch.randint(1, 30, (4, 9))
    return torch.randn(4, 3, 16, 16).to(dtype, memory_format=torch.channels_last)


def train(
    exchange, mode: str, strategy: str, synced: bool, optimizer: str, texts: bool, half=False
) -> dict:
    """Weights, running statistics and losses after three steps of two micro-batches, in float64 or,
    with `half`, in float32 with products in bfloat16."""
    dtype = torch.float32 if half else torch.float64
    model = network(texts, dtype)
    if synced:
        sync_batch_norms(model, exchange)
    fuse(model, mode)
    spread = build_strategy(strategy, model, exchange)
    steps = build_optimizer(
        optimizer,
        model,
        lr=0.01,
        weight_decay=0.0,
        in_place_of=spread.optimized_tensor,
        exchange=exchange,
    )
    torch.manual_seed(exchange.rank)
    losses = []
    for _ in range(3):
        for last in (False, True):
            x = batch(texts, dtype)
            with spread.micro_batch(last):
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    y = spread.called(x)
                loss = F.cross_entropy(y.to(dtype), torch.arange(4) % 3)
                loss.backward()
            losses.append(loss.detach())
        spread.collect_gradients()
        steps.step()
        spread.drop_gradients()
    tensors, parameters = spread.tensors(), spread.parameters
    found = {name: exchange.whole(parameters.get(name, t), t.detach()).clone()
             for name, t in tensors.items()}  # fmt: skip
    with torch.no_grad():
        found["eval"] = model.eval()(batch(texts, dtype))
    spread.weights_changed()
    return found | {"losses": torch.stack(losses)}


@pytest.fixture(scope="module")
def plain(worlds):
    """plain(strategy, synced, optimizer, texts, half) -> the ranks' results without fusing."""
    return functools.cache(lambda *how: worlds(2).run(train, "none", *how))


@pytest.mark.parametrize(
    ("mode", "synced", "optimizer", "texts"),
    [
        ("memory", False, "sgd", False),
        ("memory", False, "ngd", False),
        ("memory", True, "sgd", False),
        ("memory", False, "sgd", True),
        ("speed", True, "sgd", False),
    ],
    ids=["sgd", "ngd", "sync_bn", "texts", "speed, sync_bn"],
)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_fused_network_trains_as_the_plain_one(
    worlds, plain, strategy, mode, synced, optimizer, texts
):
    how = strategy, synced, optimizer, texts
    fused = worlds(2).run(train, mode, *how)
    for one, other in zip(plain(*how, False), fused, strict=True):
        assert_close(one, other, **EXACT)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_in_bf16_it_is_as_near_to_float64_as_the_plain_one(worlds, plain, strategy):
    """The ranks' statistics are added up in another order, so a result halfway between two bfloat16
    numbers may be rounded to either."""
    how = strategy, True, "sgd", False
    exact, near = plain(*how, False), plain(*how, True)
    fused = worlds(2).run(train, "memory", *how, True)
    for wanted, one, other in zip(exact, near, fused, strict=True):
        assert distance(other, wanted) <= 2 * distance(one, wanted)


def distance(found: dict, wanted: dict) -> float:
    """Relative, summed over the tensors."""
    pairs = [(found[name].double(), tensor) for name, tensor in wanted.items()]
    return sum((f - w.double()).norm() / (w.double().norm() + 1) for f, w in pairs).item()
