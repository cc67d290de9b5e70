"""Natural gradient: its state saved and copied, and which settings and weights are refused."""

import copy
import pickle

import pytest
import torch
from ngd_tools import (
    assert_equal_to_the_bit,
    each_form,
    give_gradients,
    saved_and_read,
    tensors,
    train,
    weights,
)
from torch import nn

from utils.optim.ngd import joined
from utils.optim.ngd.optimizer import NGD

# ---- saving -------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("steps", [0, 1, 9, 10, 13])
def test_a_loaded_state_goes_on_to_the_bit(steps, form):
    settings = {"lr": 0.05, "weight_decay": 0.1} | form
    parameters = weights()
    optimizer = NGD(parameters, **settings)
    train(optimizer, parameters, range(steps))
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    loaded = NGD(again, lr=7.0, alpha=1.0)  # its settings come with the state
    if steps == 13:  # load into one that has already made steps
        give_gradients(again, 50)
        loaded.step()
        for one, other in zip(again, parameters, strict=True):
            one.data.copy_(other)
    loaded.load_state_dict(saved_and_read(optimizer.state_dict()))
    more = range(steps, 20)  # F is updated in the first ten, then every fourth
    train(optimizer, parameters, more)
    train(loaded, again, more)
    assert_equal_to_the_bit(tensors(loaded), tensors(optimizer))


@each_form
def test_a_loaded_state_goes_on_to_the_bit_where_matrices_are_padded(monkeypatch, form):
    """As on a GPU, where a matrix is rounded otherwise when others are multiplied beside it."""
    monkeypatch.setattr(joined, "MOST_PADDING", {"cpu": 1.0})
    test_a_loaded_state_goes_on_to_the_bit(9, form)


def test_the_state_is_plain_tensors_and_a_step():
    parameters = weights()
    optimizer = NGD(parameters)
    train(optimizer, parameters, range(3))
    state = optimizer.state_dict()["state"]
    assert len(state) == len(parameters)
    for index, parameter in enumerate(parameters):
        own = dict(state[index])
        assert type(own.pop("step")) is int
        assert all(type(value) is torch.Tensor for value in own.values())
        assert not any(value.requires_grad for value in own.values())
        assert own.pop("momentum_buffer").shape == parameter.shape
        expected = {}
        for axis, length in enumerate(parameter.shape if parameter.ndim > 1 else ()):
            if length > 1:
                rank = (length + 1) // 2
                expected[f"basis_{axis}"] = (rank, length)
                expected[f"spectrum_{axis}"] = (rank, rank)
                expected[f"rest_{axis}"] = ()
        assert {key: tuple(value.shape) for key, value in own.items()} == expected


def test_no_momentum_is_kept_where_there_is_none():
    parameters = weights()
    optimizer = NGD(parameters, momentum=0.0, nesterov=False)
    train(optimizer, parameters, range(3))
    assert not any("momentum_buffer" in state for state in optimizer.state.values())


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_takes_the_same_steps(way):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6, 4))
    optimizer = NGD(model.parameters(), lr=0.05, weight_decay=0.1)
    train(optimizer, list(model.parameters()), range(6))
    both = {"model": model, "optimizer": optimizer}
    both = pickle.loads(pickle.dumps(both)) if way == "pickle" else copy.deepcopy(both)
    before = tensors(optimizer)
    train(both["optimizer"], list(both["model"].parameters()), range(6, 18))
    assert_equal_to_the_bit(tensors(optimizer), before)
    train(optimizer, list(model.parameters()), range(6, 18))
    assert_equal_to_the_bit(tensors(both["optimizer"]), tensors(optimizer))


def test_another_rank_needs_another_state():
    parameters = weights()
    optimizer = NGD(parameters, rank=2)
    train(optimizer, parameters, range(3))
    other = NGD(parameters, rank=3)
    other.load_state_dict(optimizer.state_dict())  # with its settings, as in PyTorch
    train(other, parameters, range(3, 5))
    other.param_groups[0]["rank"] = 3
    give_gradients(parameters, 5)
    with pytest.raises(RuntimeError, match="rank"):
        other.step()


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1), ("lr", float("nan")), ("momentum", -0.1), ("momentum", 1.0),
        ("weight_decay", -1e-4), ("alpha", 0.0), ("alpha", -1.0), ("alpha", float("nan")),
        ("alpha", float("inf")), ("rank", 0), ("rank", -3), ("rank", 2.5), ("update_period", 0),
        ("update_period", 2.5), ("eta", 0.0), ("eta", 1.5), ("axes", "rows"), ("axes", None),
        ("norm", "natural"), ("products", "bf16"), ("power", 0.7), ("momentum_first", None),
        ("dampening", 0.5), ("dampening", float("nan")), ("nesterov", True),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(name, value):
    settings = {name: value}
    if (name, value) == ("nesterov", True):
        settings["momentum"] = 0.0
    if name == "dampening" and value != value:
        settings["nesterov"] = False
    with pytest.raises(ValueError, match=name):
        NGD(weights(), **settings)
    with pytest.raises(ValueError, match=name):
        NGD(weights(seed=1), **{"lr": 0.1}).add_param_group({"params": weights(), **settings})


def test_a_group_may_have_settings_that_the_defaults_would_not_allow():
    NGD([{"params": weights(), "momentum": 0.9}], momentum=0.0, nesterov=False)
    optimizer = NGD([{"params": weights(), "nesterov": False, "dampening": 0.5}])
    assert optimizer.param_groups[0]["dampening"] == 0.5


@pytest.mark.parametrize("when", ["first", "later"])
def test_sparse_gradients_are_refused(when):
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = NGD(embedding.parameters())
    if when == "later":
        give_gradients([embedding.weight], 0)
        optimizer.step()
        optimizer.zero_grad()
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_complex_weights_are_refused():
    parameter = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="real"):
        NGD([parameter]).step()
