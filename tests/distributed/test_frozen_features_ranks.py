"""The features before a head, which several ranks compute together."""

import pytest
import torch
from torch import nn

from utils.data.images.loader import ImageLoader
from utils.exchange import Exchange
from utils.runs.frozen_features import NoFeatures, features
from utils.training.objective import Precision

CPU = torch.device("cpu")


class Net(nn.Module):
    """`then`: what it does with its logits."""

    HEAD = "head"

    def __init__(self, then=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.then = nn.Linear(48, 5), nn.Linear(5, 3), then

    def forward(self, x):
        return self.then(self.head(self.body(x.flatten(1)).relu()))


def loader(**options) -> ImageLoader:
    images = torch.arange(23 * 48).reshape(23, 4, 4, 3).remainder(251).byte().numpy()
    return ImageLoader(
        images, torch.arange(23).numpy() % 3, mean=[0.5] * 3, std=[1.0] * 3, batch_size=2,
        device=CPU, shuffle=True, **options,
    )  # fmt: skip


def of_rank(exchange: Exchange, precision: str) -> torch.Tensor:
    view = loader(ranks=2).in_order(exchange.rank, exchange.size)
    rows = torch.cat([*features(Net().eval(), "head", view, Precision(precision, CPU))])
    found = torch.zeros(23, 5, dtype=rows.dtype)
    found[view.visited()] = rows
    return exchange.sum(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_share_the_samples(worlds, precision):
    """23 samples in steps of 4: one rank has fillers."""
    expected = of_rank(Exchange(), precision)
    assert expected.abs().sum(1).all()
    for found in worlds(2).run(of_rank, precision):
        torch.testing.assert_close(found, expected)


def test_a_head_that_is_not_last_is_told():
    with pytest.raises(NoFeatures):
        next(features(Net(lambda x: x * 2).eval(), "head", loader(), Precision("fp32", CPU)))
