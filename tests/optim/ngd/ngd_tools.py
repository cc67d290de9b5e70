"""Shared by the tests of natural gradient: weights, gradients, runs and comparisons."""

import functools
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from utils.optim.ngd.optimizer import NGD

SHAPES = {
    "conv": (16, 8, 3, 3), "conv_again": (16, 8, 3, 3), "conv_1x1": (12, 6, 1, 1),
    "conv_1d": (8, 4, 5), "linear": (10, 12), "linear_again": (10, 12), "embedding": (200, 17),
    "odd": (3, 4, 2, 5), "two_rows": (2, 3, 5), "pair": (2, 2), "one_axis": (1, 7, 1), "bias": (5,),
    "one": (1, 1, 1), "scalar": (),
}  # fmt: skip
SMALL = {name: SHAPES[name] for name in ("conv_1d", "linear", "odd", "pair", "bias", "scalar")}
WITHOUT_LONG_AXIS = {name: shape for name, shape in SHAPES.items() if name != "embedding"}
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
# The paper's form, and momentum before inverse roots, with steps of fixed length.
NATURAL = {
    "paper": {},
    "root": {"momentum_first": True, "power": 0.5, "alpha": 0.01, "norm": "fixed"},
    "orthogonal": {
        "momentum_first": True, "power": 0.5, "alpha": 0.01, "norm": "fixed", "orthogonal": True,
        "axes": "patch",
    },
}  # fmt: skip
FORMS = NATURAL | {"adam": {"adam": True}}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_natural_form = pytest.mark.parametrize("form", NATURAL.values(), ids=NATURAL)


# ---- as NumPy arrays, by name -------------------------------------------------------------------


def random_start(shapes: dict, seed=0) -> dict:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def random_gradients(shapes: dict, steps: int, seed=1) -> list[dict]:
    """Gradients whose scatter along each axis is not a multiple of I, and whose mean is not 0."""
    rng, mixers, means = np.random.default_rng(seed), {}, {}
    for name, shape in shapes.items():
        means[name] = rng.standard_normal(shape)
        mixers[name] = [
            rng.standard_normal((n, n)) / math.sqrt(n) * np.geomspace(2, 0.2, n) for n in shape
        ]
    gradients = []
    for _ in range(steps):
        of_step = {}
        for name, shape in shapes.items():
            gradient = means[name] + rng.standard_normal(shape)
            for axis, mixer in enumerate(mixers[name]):
                gradient = np.moveaxis(np.moveaxis(gradient, axis, -1) @ mixer, -1, axis)
            of_step[name] = gradient
        gradients.append(of_step)
    return gradients


def run(start: dict, gradients: list[dict], dtype=torch.float64, optimizer=NGD, **settings):
    """(weights after every step by name, the optimizer)"""
    weights = {n: torch.tensor(value, dtype=dtype).requires_grad_() for n, value in start.items()}
    built, after = optimizer(weights.values(), **settings), []
    for step in gradients:
        for name, weight in weights.items():
            weight.grad = torch.tensor(step[name], dtype=dtype) if name in step else None
        built.step()
        after.append({n: weight.detach().double().numpy().copy() for n, weight in weights.items()})
    return after, built


def assert_near(ours: list[dict], expected: list[dict], tolerance: float) -> None:
    """Asserts that each tensor at each step has no larger difference than this, relative to its
    largest element so far. (A number that passes zero keeps its earlier rounding.)"""
    largest = {}
    for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            largest[name] = max(largest.get(name, 0.0), np.abs(value).max())
            difference = np.abs(one[name] - value).max() / largest[name]
            assert difference <= tolerance, f"{name} at step {step}: {difference:.1e}"


# ---- as parameters, in a list -------------------------------------------------------------------

PARAMETERS = ((6, 4, 3, 3), (6, 4, 3, 3), (8, 4, 1, 1), (7, 9), (5,), ())


def weights(shapes=PARAMETERS, dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


@functools.cache
def _gradient(shape: torch.Size, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    for axis, length in enumerate(shape):
        size = [1] * len(shape)
        size[axis] = length
        gradient = gradient * torch.logspace(0, -1, length, dtype=torch.float64).view(size)
    return gradient


def give_gradients(parameters, step: int, scale=1.0) -> None:
    """Sets gradients that depend on the step alone, larger along some channels than others."""
    for index, parameter in enumerate(parameters):
        parameter.grad = (scale * _gradient(parameter.shape, 1000 * step + index)).to(parameter)


def train(optimizer, parameters, steps) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def flat(lists: list[list]) -> list:
    return [each for one in lists for each in one]


def tensors(optimizer) -> list[torch.Tensor]:
    """Copies of all parameters and of the tensors of their state, in a fixed order."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(parameter.detach().clone())
            state = optimizer.state.get(parameter, {})
            found += [state[key].clone() for key in sorted(state) if torch.is_tensor(state[key])]
    return found


def assert_equal_to_the_bit(one, other) -> None:
    assert len(one) == len(other)
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), index


def saved_and_read(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
