"""Fused models over ranks against plain ones."""

import pytest
import torch
import torch.nn.functional as F

from utils.distributed.strategies import build_strategy
from utils.distributed.sync_batch_norm import sync_batch_norms
from utils.fused import fuse
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer


def network(texts: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    if texts:
        return Transformer(30, 3, 2, 16, 2, 16, 12)
    return ResNet(18, 3, 4, drop_path=0.2).to(memory_format=torch.channels_last)


def batch(texts: bool) -> torch.Tensor:
    if texts:
        return torch.randint(1, 30, (4, 9))
    return torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)


def train(
    exchange, mode: str, strategy: str, synced: bool, optimizer: str, half: bool, texts: bool
) -> dict:
    """Weights, running statistics and losses after four steps of two micro-batches."""
    model = network(texts)
    if synced:
        model = sync_batch_norms(model, exchange)
    fuse(model, mode)
    spread = build_strategy(strategy, exchange)
    wrapped = spread.wrap(model)
    steps = build_optimizer(
        optimizer, model, lr=0.01, weight_decay=0.0, in_place_of=spread.own, exchange=exchange
    )
    torch.manual_seed(exchange.rank)
    losses = []
    for _ in range(4):
        for last in (False, True):
            x = batch(texts)
            with spread.micro_batch(last):
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    y = wrapped(x)
                loss = F.cross_entropy(y.float(), torch.arange(4) % 3)
                loss.backward()
            losses.append(loss.detach())
        spread.collect_gradients()
        steps.step()
        spread.drop_gradients()
    tensors, parameters = spread.tensors(), spread.parameters
    found = {name: exchange.whole(parameters.get(name, t), t.detach()).clone()
             for name, t in tensors.items()}  # fmt: skip
    with torch.no_grad():
        found["eval"] = model.eval()(batch(texts))
    spread.weights_changed()
    return found | {"losses": torch.stack(losses)}


@pytest.mark.parametrize(
    ("mode", "synced", "optimizer", "half", "texts"),
    [
        ("memory", False, "sgd", False, False),
        ("memory", False, "ngd", False, False),
        ("memory", True, "sgd", False, False),
        ("memory", True, "sgd", True, False),
        ("memory", False, "sgd", False, True),
        ("speed", True, "sgd", False, False),
    ],
    ids=["sgd", "ngd", "sync_bn", "sync_bn, bf16", "texts", "speed, sync_bn"],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_fused_network_trains_as_the_plain_one(
    worlds, strategy, mode, synced, optimizer, half, texts
):
    plain, fused = (
        worlds(2).run(train, way, strategy, synced, optimizer, half, texts)
        for way in ("none", mode)
    )
    for one, other in zip(plain, fused, strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(
                other[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
