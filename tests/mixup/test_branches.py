"""Functions with branches: recorded once, kept wherever the input moves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from utils.mixup.branches import Branches


def name_of(function) -> str:
    """The same in every process, unlike `str` of a function."""
    return str(function) if isinstance(function, nn.Module) else function.__name__


@pytest.mark.parametrize(
    "relu",
    [
        torch.relu,
        F.relu,
        torch.Tensor.relu,
        nn.ReLU(),
        nn.ReLU(inplace=True),
        torch.relu_,
        lambda x: F.relu(x, True),
    ],
)
def test_masks_of_relus_are_kept(relu):
    branches, first = Branches(), torch.tensor([-1.0, 2.0, 3.0])
    with branches:
        assert relu(first.clone()).tolist() == [0, 2, 3]
    for _ in range(2):
        moved = torch.tensor([1.0, -2.0, 3.0])
        with branches:
            assert relu(moved).tolist() == [0, -2, 3]
    assert relu(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]


# Function -> its kinks.
KINKED = {
    nn.ReLU(): [0],
    nn.ReLU6(): [0, 6],
    nn.ReLU6(inplace=True): [0, 6],
    F.relu6: [0, 6],
    nn.Hardtanh(-2, 3): [-2, 3],
    nn.LeakyReLU(0.1): [0],
    nn.LeakyReLU(0.1, inplace=True): [0],
    nn.PReLU(init=0.3).double(): [0],
    nn.Hardsigmoid(): [-3, 3],
    nn.Hardswish(): [-3, 3],
    nn.Hardswish(inplace=True): [-3, 3],
}


def value_and_slope(function, x):
    x = x.clone().requires_grad_()
    y = function(1 * x)
    return y.detach(), grad(y.sum(), x)[0]


X = torch.linspace(-8, 8, 161, dtype=torch.float64) + 0.03  # kinks at whole numbers lie between


def recorded_twice(function) -> tuple[Branches, tuple]:
    """(the branches at X, value and slope there), after a replay that must give what was recorded
    and what there is without them."""
    branches = Branches()
    with branches:
        recorded = value_and_slope(function, X)
    with branches:
        again = value_and_slope(function, X)
    plain = value_and_slope(function, X)
    for one, same, expected in zip(recorded, again, plain, strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-12)
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-7)  # PyTorch rounds 1 / 6
    return branches, again


@pytest.mark.parametrize("function", KINKED, ids=name_of)
def test_functions_of_an_element_go_on_straight_beyond_their_kinks(function):
    branches, again = recorded_twice(function)
    step = 0.08
    with branches:
        moved, slope = value_and_slope(function, X + step)
    crossed = sum((kink > X) & (X + step > kink) for kink in KINKED[function]).bool()
    assert crossed.any()
    # The branch goes on: for hardswish a parabola, else a line.
    middle = (X.abs() < 3).double() * ("Hardswish" in str(function))
    expected = again[0] + step * again[1] + middle * step**2 / 6
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-12)
    expected_slope = again[1] + middle * step / 3
    torch.testing.assert_close(slope, expected_slope, rtol=0, atol=1e-12)


def pool_by_torch(x):
    return torch.max_pool2d(x, 2)


POOLS = (nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), pool_by_torch)


@pytest.mark.parametrize("pool", POOLS, ids=name_of)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_keeps_the_places_of_its_maxima(pool, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64).contiguous(memory_format=layout)
    moved = torch.randn_like(x)
    branches = Branches()
    with branches:
        values, slope = value_and_slope(pool, x)
    plain, plain_slope = value_and_slope(pool, x)
    assert torch.equal(values, plain) and torch.equal(slope, plain_slope)
    with branches:
        values, slope = value_and_slope(pool, moved)
    assert torch.equal(slope, plain_slope)
    # Linear in the input now: each value is the input at the place of the old maximum.
    total = (moved * plain_slope).sum()
    torch.testing.assert_close(values.sum(), total, rtol=0, atol=1e-12)
    assert not torch.equal(values, pool(moved))


def timms_hard_swish(h):
    return h * F.relu6(h + 3).div_(6)


def preactivated(activation):
    """The branch beside it sees what an in-place function has done."""

    def function(h):
        h = 1 * h
        return activation(h) + h

    return function


def ignoring(activation):
    def function(h):
        h = 1 * h
        activation(h)
        return h

    return function


IN_PLACE = (torch.relu_, nn.ReLU(True), nn.ReLU6(True), nn.LeakyReLU(0.1, True), nn.Hardswish(True))


@pytest.mark.parametrize(
    "function",
    [
        timms_hard_swish,
        lambda h: F.dropout(F.relu6(h), 0.0, True, True) * 2,
        lambda h: F.relu6(1 * h).add_(h),
        *(kind(each) for kind in (preactivated, ignoring) for each in IN_PLACE),
        lambda h: F.prelu(input=h, weight=torch.tensor([0.3], dtype=torch.float64)),
        lambda h: torch.prelu(h, torch.tensor([0.3], dtype=torch.float64)),
        lambda h: F.hardtanh(h, -2, max_val=3),
    ],
    ids=range(16),
)
def test_in_place_or_not_replays_are_what_was_recorded(function):
    branches, again = recorded_twice(function)
    with branches:
        near = value_and_slope(function, X + 1e-9)
    for one, other in zip(again, near, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
