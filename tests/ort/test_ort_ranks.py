"""ONNX Runtime in several processes."""

import pytest
import torch
import torch.nn.functional as F
from distributed.world import Worlds
from ort_models import pictures, vit

from utils.distributed.strategies.base import Strategy, build_strategy
from utils.engines.ort.module import Ort
from utils.exchange import Exchange
from utils.optim.factory import build_optimizer
from utils.reporting.console import Console
from utils.training.controls import Freeze


@pytest.fixture(scope="module")
def world():
    groups = Worlds()
    yield groups(2)
    groups.close()


def train(exchange: Exchange, spread: Strategy, called, unfreezes: bool) -> dict[str, torch.Tensor]:
    """Weights after three steps of two micro-batches; each rank has its part of the batches. With
    `unfreezes` the first step trains the head alone."""
    model, size = spread.model, exchange.size
    optimizer = build_optimizer("sgd", model, lr=0.1, weight_decay=0.0, exchange=exchange)
    freeze = Freeze(model, ("head",), until=1)
    for step in range(3):
        if unfreezes:
            freeze.apply(step)
        for last in (False, True):
            whole = pictures(8, seed=10 * step + last)
            part = slice(exchange.rank * 8 // size, (exchange.rank + 1) * 8 // size)
            with spread.micro_batch(last):
                logits = called(whole[part])
                targets = (torch.arange(8) % 5)[part]
                (F.cross_entropy(logits, targets, reduction="sum") / (16 / size)).backward()
        spread.collect_gradients()
        optimizer.step()
        spread.drop_gradients()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def on_a_rank(exchange: Exchange, unfreezes: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    spread = build_strategy("ddp", vit().train(), exchange, unfreezes)
    called = Ort().wrap(spread, Console())
    assert called is spread.called  # whose forward pass prepares the exchange of gradients
    return train(exchange, spread, called, unfreezes)


@pytest.mark.parametrize("unfreezes", [False, True])
def test_two_ranks_train_as_one_process_of_pytorch(world, unfreezes):
    torch.manual_seed(0)
    alone = Strategy(vit().train())
    expected = train(alone.exchange, alone, alone.called, unfreezes)
    ranks = world.run(on_a_rank, unfreezes)
    for name, tensor in expected.items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
