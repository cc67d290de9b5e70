"""With class weights several ranks take the steps of one process: the loss is the weighted mean
over all of them."""

import tempfile
from pathlib import Path

import pytest
import torch
import toy
from toy import history, network

from utils.exchange import Exchange
from utils.training.class_balance import ClassBalance


def trained(exchange, strategy: str, batch_size: int):
    """(weights, losses that were logged) after two epochs, on samples of unequal weights."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = toy.make_trainer(
            Path(folder), exchange=exchange, strategy=strategy, batch_size=batch_size, epochs=2,
            model=network(norm=False), eval_every=0, clip=0.5, least=1,
            balance=ClassBalance(0.1, torch.tensor([0.1, 1.0, 5.0]), focal_gamma=1.0),
            by_class=True,
        )  # fmt: skip
        trainer.fit()
        losses = [record["loss"] for record in history(Path(folder))] if exchange.rank == 0 else []
    weights = trainer.steps.strategy.weights()
    return torch.cat([weight.detach().flatten() for weight in weights.values()]), losses


@pytest.fixture(scope="module")
def alone():
    return trained(Exchange(), "ddp", 6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(worlds, alone, strategy):
    (weights, losses), (others, _) = worlds(2).run(trained, strategy, 3)
    assert torch.equal(weights, others)
    torch.testing.assert_close(weights, alone[0], rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx(alone[1], rel=1e-5)
