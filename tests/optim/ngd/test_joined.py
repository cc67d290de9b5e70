"""Joining the tensors of many axes, and padding matrices to a common size, as on a GPU."""

from unittest.mock import patch

import pytest
import torch
from ngd_tools import (
    SMALL,
    assert_near,
    each_natural_form,
    random_gradients,
    random_start,
    run,
)

from utils.optim.ngd import joined
from utils.optim.ngd.joined import Layout, padded_sizes


def test_sizes_are_padded_where_that_adds_little():
    ranks, counts = [2, 5, 32, 64, 80], [35, 1, 15, 16, 75]  # of ResNet-50
    assert padded_sizes(ranks, counts, 0.0) == ranks
    assert padded_sizes(ranks, counts, 1 / 8) == [32, 32, 32, 80, 80]
    assert padded_sizes(ranks, counts, 1e6) == [80] * 5
    assert padded_sizes([5, 5, 6], [1, 2, 100], 1 / 8) == [6, 6, 6]  # two lengths of one rank


@pytest.mark.parametrize("most", [0.0, 1e6])
def test_what_is_joined_is_divided_again(most):
    shapes, counts = [(2, 3), (2, 3), (2, 9), (4, 8)], [2, 1, 3, 2]
    with patch.dict(joined.MOST_PADDING, cpu=most):
        layout = Layout(shapes, counts, torch.device("cpu"))
    of_axes = [torch.randn(n, r, r) for (r, _), n in zip(shapes, counts, strict=True)]
    of_shapes = layout.to_shapes(of_axes)
    assert [tuple(each.shape) for each in of_shapes] == [(3, 2, 2), (3, 2, 2), (2, 4, 4)]
    of_sizes = layout.to_sizes(of_shapes)
    expected = [(8, 4, 4)] if most else [(6, 2, 2), (2, 4, 4)]
    assert [tuple(each.shape) for each in of_sizes] == expected
    again = layout.to_axes(layout.cut(of_sizes))
    for one, other in zip(again, of_axes, strict=True):
        assert torch.equal(one, other)
    numbers = torch.arange(8.0)
    assert torch.equal(torch.cat(layout.for_shapes(numbers)).flatten(), numbers)
    assert torch.equal(torch.cat(layout.for_sizes(numbers)).flatten(), numbers)
    factors = [1.0, 10.0, 100.0]
    assert layout.times(numbers, factors).tolist() == [0, 1, 2, 30, 40, 50, 600, 700]


@each_natural_form
def test_padding_changes_no_step(form):
    start, gradients = random_start(SMALL), random_gradients(SMALL, 30)
    expected, _ = run(start, gradients, **form)
    with patch.dict(joined.MOST_PADDING, cpu=1e6):
        ours, _ = run(start, gradients, **form)
    assert_near(ours, expected, 1e-9)
