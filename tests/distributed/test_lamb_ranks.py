"""LAMB with sharded parameters takes the steps of a single process."""

import pytest
import torch
from torch import nn

from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange
from utils.optim.factory import build_optimizer


def network() -> nn.Module:
    """With fewer rows than ranks, rows that 4 does not divide, and a bias that starts at 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    nn.init.zeros_(model[2].bias)
    return model.double()


def train(exchange, strategy: str, decay_all: bool, bias_correction: bool) -> list[torch.Tensor]:
    """The weights after 20 steps, in which all ranks have the same samples, and one is left out."""
    model = network()
    spread = build_strategy(strategy, exchange)
    called = spread.wrap(model, unfreezes=False)
    optimizer = build_optimizer(
        "lamb", model, lr=0.02, weight_decay=0.1, decay_all=decay_all, in_place_of=spread.own,
        exchange=spread.optimizer_exchange, lamb_bias_correction=bias_correction,
    )  # fmt: skip
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        with spread.micro_batch(True):
            nn.functional.cross_entropy(called(inputs), torch.arange(8) % 3).backward()
        spread.collect_gradients()
        optimizer.found_inf = torch.tensor(float(step == 7))
        optimizer.step()
        spread.drop_gradients()
    tensors, parameters = spread.tensors(), spread.parameters
    return [
        spread.exchange.whole(parameters.get(name, tensor), tensor.detach()).clone()
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("decay_all", "bias_correction"), [(False, True), (True, True), (True, False)]
)
def test_ranks_take_the_steps_of_one_process(worlds, size, strategy, decay_all, bias_correction):
    alone = train(Exchange(), "ddp", decay_all, bias_correction)
    for rank in worlds(size).run(train, strategy, decay_all, bias_correction):
        for one, other in zip(rank, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
