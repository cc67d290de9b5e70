"""How many kernels a step of NGD launches on a GPU, and how many operations the host dispatches,
counted on a fake one."""

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from launches import Launches, on_the_gpu, resnet50
from torch import nn

from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer
from utils.optim.ngd.batch import EARLY_UPDATES
from utils.optim.ngd.optimizer import NGD


def transformer() -> nn.Module:
    return Transformer(1000, 4, layers=6, dim=512, heads=8, ffn=2048, max_len=128, dropout=0.0)


@pytest.mark.parametrize(
    ("make", "orthogonal", "most", "most_with_update"),
    [
        pytest.param(resnet50, False, (203, 265), (785, 1140), marks=pytest.mark.slow),
        pytest.param(resnet50, True, (585, 900), (1140, 1725), marks=pytest.mark.slow),
        pytest.param(transformer, False, (65, 80), (330, 480), marks=pytest.mark.slow),
        pytest.param(transformer, True, (135, 200), (370, 550), marks=pytest.mark.slow),
    ],
    ids=["resnet50", "orthogonal_resnet50", "transformer", "orthogonal"],
)
def test_launches_of_a_step(make, orthogonal, most, most_with_update):
    """`most`: launches, and operations in all."""
    groups = build_optimizer(
        "ngd", make(), lr=0.02, weight_decay=0.05, ngd_orthogonal=orthogonal
    ).param_groups
    with fake_cuda():
        for group in groups:
            group["params"] = [nn.Parameter(on_the_gpu(p)) for p in group["params"]]
            for parameter in group["params"]:
                parameter.grad = on_the_gpu(parameter)
        optimizer = NGD(groups)
        optimizer.found_inf = torch.zeros((), device=CUDA)
        counted = []
        for step in range(EARLY_UPDATES + 7):
            with Launches() as launches:
                optimizer.step()
            if step >= EARLY_UPDATES:
                counted.append((launches.counts.total(), launches.calls))
    for found, limits in ((min(counted), most), (max(counted), most_with_update)):
        assert found[0] <= limits[0] and found[1] <= limits[1], found
