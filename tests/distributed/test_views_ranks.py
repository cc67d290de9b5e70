"""Several processes evaluate by averages over views as one does."""

import pytest
import torch
import toy

from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange
from utils.training.evaluation import evaluate
from utils.training.objective import Precision


def evaluated(exchange, strategy: str, precision: str, samples: int) -> dict:
    model = toy.network(norm=False)
    build_strategy(strategy, model, exchange)
    data = toy.loader(
        2, n=samples, augment=False, shuffle=False, rank=exchange.rank, ranks=exchange.size, least=2
    )
    result = evaluate(
        model, data.epoch(), Precision(precision, toy.CPU), exchange=exchange, views="mirror"
    )
    assert torch.is_grad_enabled()
    return result.figures | {f"views {k}": value for k, value in result.views_figures.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("samples", [12, 21])  # the latter leave a rank fillers
def test_ranks_count_as_one_process_does(worlds, strategy, precision, samples):
    one = evaluated(Exchange(), "ddp", precision, samples)
    first, second = worlds(2).run(evaluated, strategy, precision, samples)
    assert first == second and first["samples"] == samples
    assert first["views loss"] != first["loss"]
    assert first["views accuracy"] == one["views accuracy"]
    assert first == pytest.approx(one, rel=1e-6 if precision == "fp32" else 1e-2)
