"""Optimizers with sharded parameters take the steps of one process. NGD: test_ngd_shares.py."""

import pytest
import torch
from torch import nn

from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange
from utils.optim.factory import build_optimizer


def network() -> nn.Module:
    """With a kernel, matrices of one shape and of that shape transposed, fewer rows than ranks,
    rows that 2 and 4 do not divide, and a bias that starts at 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 24), nn.Unflatten(1, (6, 2, 2)), nn.Conv2d(6, 5, 2), nn.Flatten(),
        nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(),
        nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip
    nn.init.zeros_(model[4].bias)
    return model.double()


def train(exchange, strategy: str, name: str, options: dict) -> list[torch.Tensor]:
    """The weights after 20 steps, in which all ranks have the same samples, and one is left out."""
    model = network()
    spread = build_strategy(strategy, model, exchange)
    optimizer = build_optimizer(
        name, model, lr=0.02, weight_decay=0.1, in_place_of=spread.optimized_tensor,
        exchange=spread.optimizer_exchange, **options,
    )  # fmt: skip
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        with spread.micro_batch(True):
            nn.functional.cross_entropy(spread.called(inputs), torch.arange(8) % 3).backward()
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
    ("name", "options"),
    [
        ("lamb", {}),
        ("lamb", {"decay_all": True}),
        ("lamb", {"decay_all": True, "lamb_bias_correction": False}),
        ("muon", {"muon_normalize": True, "adam_lr_scale": 0.5}),
        ("muon", {"decay_all": True, "lookahead_k": 3}),
        ("madgrad", {}),
        ("fusednovograd", {"decay_all": True}),
    ],
)
def test_ranks_take_the_steps_of_one_process(worlds, size, strategy, name, options):
    alone = train(Exchange(), "ddp", name, options)
    tolerance = 1e-12 if name == "lamb" else 1e-9
    for rank in worlds(size).run(train, strategy, name, options):
        for one, other in zip(rank, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
