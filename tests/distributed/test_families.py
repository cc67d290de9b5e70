"""Models of timm under FSDP, which gathers their blocks one at a time: the gradients of two
processes are those of one. Statistics of BatchNorm are fixed, as they would differ by rank."""

import pytest
import timm
import torch

from tests.end_to_end.test_vit_runs import FAMILIES
from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange
from utils.models.parts import blocks_of

QUICK = ("test_vit", "test_convnext")


def gradients(exchange, name: str, strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = timm.get_pretrained_cfg(name)
    size = {"img_size": 64} if config is not None and config.fixed_input_size else {}
    model = timm.create_model(name, num_classes=5, **size)
    model.eval().double()
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 3])
    blocks = len(blocks_of(model))
    strategy = build_strategy(strategy, model, exchange)
    assert blocks >= 3
    each = len(x) // exchange.size
    own = slice(exchange.rank * each, (exchange.rank + 1) * each)
    with strategy.micro_batch(last=True):
        torch.nn.functional.cross_entropy(strategy.called(x[own]), targets[own]).backward()
    strategy.collect_gradients()
    return {name: gradient.clone() for name, gradient in strategy.gradients().items()}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_gradients_are_those_of_one_process(worlds, name):
    alone = gradients(Exchange(), name, "ddp")
    for rank in worlds(2).run(gradients, name, "fsdp"):
        assert rank.keys() == alone.keys()
        for key, gradient in alone.items():
            torch.testing.assert_close(rank[key], gradient, rtol=1e-9, atol=1e-11, msg=key)
