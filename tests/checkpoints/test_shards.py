"""Which rows of a divided model are whose: without other processes."""

import torch

from utils.checkpoints.shards import is_by_element


def test_only_what_has_the_shape_of_the_parameter_is_by_element():
    shape = torch.Size([4, 3])
    assert is_by_element("exp_avg", torch.zeros(4, 3), shape)
    assert not is_by_element("basis_0", torch.zeros(4, 3), shape)
    assert not is_by_element("step", torch.zeros(()), torch.Size([]))
    for other in [(4,), (3, 4), (4, 4), (5, 3), (4, 3, 1)]:
        assert not is_by_element("exp_avg", torch.zeros(other), shape)
