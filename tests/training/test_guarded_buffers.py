"""The buffers of a model lie in the guard's memory, and its modules need not know."""

import pytest
import torch
from torch import nn
from toy import make_trainer, network

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


class Assigns(nn.Module):
    """Makes a new tensor of its running mean in each step, and one of another size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(0, 3))
        self.alike = nn.Module()
        self.alike.register_buffer("mean", self.mean)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.seen = torch.cat([self.seen, x[:1]])
        return self.linear(x - self.mean)


def test_an_assigned_buffer_stays_in_the_memory_of_the_guard():
    model = Assigns()
    guard, x = Guard(model), torch.randn(5, 3)
    guard.start()
    for step in range(1, 4):
        model(x).sum().backward()
        guard.collect_buffers()
        torch.testing.assert_close(model.mean, (1 - 0.9**step) * x.mean(0))
        assert model.mean.untyped_storage().data_ptr() == guard.flat[0].untyped_storage().data_ptr()
        assert len(model.seen) == step  # is left to the model
        assert model.mean.grad_fn is None
        guard.remember()
    before = model.mean.clone()
    model(torch.full((5, 3), torch.nan))
    guard.collect_buffers()
    assert model.mean.isnan().all()
    guard.take_back(torch.tensor(True))
    assert torch.equal(model.mean, before)


def test_a_shared_buffer_stays_shared():
    model = Assigns()
    assert model.alike.mean is model.mean
    Guard(model)
    assert model.alike.mean is model.mean


@pytest.mark.parametrize("local", [None, {"workers": 3}])
def test_a_run_averages_and_saves_an_assigned_buffer(tmp_path, local):
    trainer = make_trainer(tmp_path, model=AssignsPictures(), ema_decay=0.9, local=local, epochs=2)
    trainer.fit()
    checkpoint = trainer.saver.store.load()
    held = [trainer.steps.model.mean]
    if local:
        held = [worker.tensors["mean"] for worker in trainer.steps.own]
        assert not torch.equal(held[0], held[1])
    torch.testing.assert_close(checkpoint.model["mean"], sum(held) / len(held))
    for state in (checkpoint.model, checkpoint.parts["average"]):
        assert 0 < state["mean"].abs().sum() < 10


class AssignsPictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.network = network()

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean((0, 2, 3)).view(3, 1, 1)
        return self.network(x - self.mean)
