"""Joining the tensors of many axes, and of many batches, and padding matrices to a common size, as
on a GPU."""

from unittest.mock import patch

import pytest
import torch
from ngd_tools import (
    SHAPES,
    SMALL,
    assert_equal_to_the_bit,
    assert_near,
    each_natural_form,
    random_gradients,
    random_start,
    run,
    tensors,
)

from utils.optim.ngd import joined, stack
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


@each_natural_form
def test_stacks_of_several_batches_change_no_bit(form):
    """Parameters whose layout is not that of the stacked gradients have their own second buffer."""
    start, gradients = random_start(SHAPES), random_gradients(SHAPES, 12)
    for settings in (form, form | {"weight_decay": 0.1, "products": "fast"}):
        for dtype in (torch.float32, torch.bfloat16):
            _, alone = run(start, gradients, dtype, **settings)
            with patch.object(stack, "ONE_BY_ONE", set()):
                _, joint = run(start, gradients, dtype, **settings)
            assert len(joint._stacks) < len(alone._stacks) == len(joint._batches)
            assert_equal_to_the_bit(tensors(joint), tensors(alone))
