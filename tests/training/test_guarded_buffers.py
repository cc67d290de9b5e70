"""The buffers of a model lie in the guard's memory, and its modules need not know."""

import torch
from torch import nn

from utils.training.guard import Guard


class LooksUp(nn.Module):
    """Its backward pass needs a buffer that holds an index and one that holds numbers, after a
    BatchNorm has changed its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0))
        self.register_buffer("index", torch.tensor([3, 1, 1]))
        self.register_buffer("filter", torch.tensor([1.0, 2.0, 4.0]))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x) + self.table[self.index] * self.filter


def test_a_change_of_one_buffer_is_none_of_another():
    model = LooksUp()
    Guard(model)
    looked_up = model.table[model.index] * model.filter
    model.norm(torch.randn(5, 3))  # changes its buffers before the backward pass
    looked_up.sum().backward()
    assert model.table.grad.tolist() == [0.0, 6.0, 0.0, 1.0]


def test_a_bad_step_is_taken_back():
    model = LooksUp()
    guard = Guard(model)
    guard.remember()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(5, 3))
    assert model.norm.num_batches_tracked == 1
    guard.take_back(torch.tensor(True))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
