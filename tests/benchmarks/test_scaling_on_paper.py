"""benchmarks/scaling_on_paper.py: limits of its estimates, and counts that agree with the code."""

import dataclasses
import math

import pytest
import torch

from benchmarks.scaling_on_paper import (
    CLUSTERS,
    FLOAT,
    KINDS,
    MODELS,
    SIZES,
    buckets,
    compute,
    ngd,
    step,
)
from utils.models.resnet import ResNet
from utils.optim.ngd.batch import axes_of
from utils.optim.ngd.batched_fisher import is_whole
from utils.optim.ngd.fisher import default_rank
from utils.optim.ngd.shares import update_cost

CASES = [(model, cluster) for model in MODELS for cluster in CLUSTERS]
IDS = [f"{model.name}-{cluster.name}" for model, cluster in CASES]


@pytest.mark.parametrize("model, cluster", CASES, ids=IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_the_efficiency(model, cluster, kind):
    alone = step(model, cluster, 1, kind)
    expected = compute(model) + (ngd(model, cluster, 1) if kind == "ddp, ngd" else 0)
    assert alone == pytest.approx(expected, rel=1e-12)
    faster = dataclasses.replace(cluster, inside=2 * cluster.inside, between=2 * cluster.between)
    slower = dataclasses.replace(
        cluster, step_inside=3 * cluster.step_inside, step_between=3 * cluster.step_between
    )
    for gpus in SIZES:
        seconds = step(model, cluster, gpus, kind)
        assert seconds >= compute(model)
        assert step(model, faster, gpus, kind) <= seconds <= step(model, slower, gpus, kind)
    free = dataclasses.replace(
        cluster, inside=math.inf, between=math.inf, step_inside=0.0, step_between=0.0, base=0.0
    )
    if kind != "ddp, ngd":  # NGD's own computation takes time
        assert step(model, free, SIZES[-1], kind) == pytest.approx(compute(model), rel=1e-12)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_buckets_are_the_gradient(model):
    assert sum(buckets(FLOAT * model.parameters)) == FLOAT * model.parameters


def vit_base() -> list[tuple]:
    """Shapes of ViT-B/16's parameters (Dosovitskiy et al. 2021, arXiv:2010.11929)."""
    width, hidden, classes = 768, 3072, 1000
    norm = [(width,), (width,)]
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (hidden, width)]
    block += [(hidden,), (width, hidden), (width,), *norm, *norm]
    ends = [(width, 3, 16, 16), (width,), (1, 1, width), (1, 197, width), *norm]
    return ends + 12 * block + [(classes, width), (classes,)]


def resnet50() -> list[tuple]:
    with torch.device("meta"):
        return [
            tuple(parameter.shape) for parameter in ResNet(50, 1000, stem="imagenet").parameters()
        ]


@pytest.mark.parametrize(
    "model, shapes", ((MODELS[0], resnet50), (MODELS[1], vit_base)), ids=("resnet50", "vit_base")
)
def test_counts_are_those_of_the_code(model, shapes):
    precondition, updates, numbers = 0, [], []
    elements = [math.prod(shape) for shape in shapes()]
    for shape, size in zip(shapes(), elements, strict=True):
        for axis in axes_of(torch.Size(shape), "all"):
            length = shape[axis]
            rank = default_rank(length)
            precondition += size * (length if is_whole(rank, length) else 2 * rank)
            updates.append(update_cost(rank, length, size))
            numbers.append(rank * length + rank**2 + 1)  # basis, spectrum, rest
    counted = {
        "parameters": sum(elements),
        "precondition": precondition,
        "update": round(sum(updates)),
        "largest_update": round(max(updates)),
        "fisher": sum(numbers),
        "largest_fisher": max(numbers),
    }
    assert counted == {name: getattr(model, name) for name in counted}


def test_resnets_statistics():
    with torch.device("meta"):
        model = ResNet(50, 1000, stem="imagenet")
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    assert sum(buffer.numel() for buffer in floating) == MODELS[0].statistics
