"""Which tensors of an optimizer's state are divided as their parameter is."""

import torch

from utils.checkpoints.shards import is_by_element


def test_only_tensors_of_the_parameters_shape_are_by_element():
    shape = torch.Size([4, 3])
    assert is_by_element("exp_avg", torch.zeros(4, 3), shape)
    assert not is_by_element("basis_0", torch.zeros(4, 3), shape)
    assert not is_by_element("step", torch.zeros(()), torch.Size([]))
    for other in [(4,), (3, 4), (4, 4), (5, 3), (4, 3, 1)]:
        assert not is_by_element("exp_avg", torch.zeros(other), shape)
