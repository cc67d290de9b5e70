"""Natural gradient: weights in any format, its state saved and copied, and what is refused."""

import copy
import pickle

import pytest
import torch
from ngd_tools import (
    assert_equal_to_the_bit,
    each_foreach,
    flat,
    give_gradients,
    saved_and_read,
    tensors,
    train,
    weights,
)
from torch import nn

from utils.optim.ngd import NGD

# ---- formats ------------------------------------------------------------------------------------


def is_channels_last(tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@each_foreach
@pytest.mark.parametrize("gradients_channels_last", [False, True])
def test_channels_last_is_contiguous_to_rounding(foreach, gradients_channels_last):
    plain, last = weights(), weights()
    for parameter in last:
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    optimizers = [NGD(each, foreach=foreach, weight_decay=0.1) for each in (plain, last)]
    for step in range(15):
        for parameters in (plain, last):
            give_gradients(parameters, step)
        for parameter in last:
            if parameter.ndim == 4:
                order = torch.channels_last if gradients_channels_last else torch.contiguous_format
                parameter.grad = parameter.grad.contiguous(memory_format=order)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(last, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert is_channels_last(last[0])
    assert is_channels_last(optimizers[1].state[last[0]]["momentum_buffer"])


def test_a_state_from_contiguous_weights_serves_channels_last_ones():
    plain, last = weights(), weights()
    optimizer = NGD(plain)
    train(optimizer, plain, range(5))
    for parameter, value in zip(last, plain, strict=True):
        parameter.data = value.detach().clone()
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    other = NGD(last)
    other.load_state_dict(saved_and_read(optimizer.state_dict()))
    train(optimizer, plain, range(5, 12))
    train(other, last, range(5, 12))
    for one, expected in zip(last, plain, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


def test_weights_that_become_channels_last_between_steps():
    plain, moved = weights(), weights()
    optimizers = NGD(plain), NGD(moved)
    for step in range(6):
        if step == 3:
            for parameter in moved[:3]:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        for optimizer, parameters in zip(optimizers, (plain, moved), strict=True):
            train(optimizer, parameters, [step])
    for one, other in zip(moved, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def momentum_is_right(dtype) -> bool:
    """Of PyTorch's own fused SGD on a CPU: with torch 2.10 it is not, in half precision."""
    found = []
    for fused in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 40).to(dtype))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        for _ in range(3):
            weight.grad = torch.linspace(1, 2, 40).to(dtype)
            optimizer.step()
        found.append(weight.detach().float())
    return torch.allclose(*found, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fisher_matrices_of_short_floats_are_float32(dtype):
    """And stay so, to the bit, when a state is loaded, though PyTorch casts to the parameters'."""
    if not momentum_is_right(dtype):
        pytest.skip("this PyTorch's fused SGD is wrong in half precision on a CPU")
    parameters = weights(dtype=dtype)
    optimizer = NGD(parameters, lr=0.01)
    train(optimizer, parameters, range(6))
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    loaded = NGD(again)
    loaded.load_state_dict(saved_and_read(optimizer.state_dict()))
    for of, own in ((optimizer, parameters), (loaded, again)):
        for parameter in own:
            for key, value in of.state[parameter].items():
                short = key == "momentum_buffer"
                assert key == "step" or value.dtype == (dtype if short else torch.float32), key
    assert_equal_to_the_bit(tensors(loaded), tensors(optimizer))
    train(optimizer, parameters, range(6, 16))
    train(loaded, again, range(6, 16))
    assert_equal_to_the_bit(tensors(loaded), tensors(optimizer))
    exact = weights(dtype=dtype)
    exact = [nn.Parameter(parameter.detach().float()) for parameter in exact]
    train(NGD(exact, lr=0.01), exact, range(16))
    for one, other in zip(parameters, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)


@each_foreach
def test_several_dtypes_at_once(foreach):
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    together = [weights(dtype=dtype) for dtype in kinds]
    apart = [weights(dtype=dtype) for dtype in kinds]
    optimizer = NGD(flat(together), lr=0.01, foreach=foreach)
    others = [NGD(each, lr=0.01, foreach=foreach) for each in apart]
    for step in range(14):
        for one, other in zip(together, apart, strict=True):
            give_gradients(one, step)
            give_gradients(other, step)
        optimizer.step()
        for other in others:
            other.step()
    for one, other in zip(flat(together), flat(apart), strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-2 if one.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 3), (5, 1), (1, 1, 6, 1)])
def test_shapes_that_leave_nothing_to_learn(shape):
    parameters = weights([shape, (4, 3)])
    optimizer = NGD(parameters)
    train(optimizer, parameters, range(5))
    assert not [key for key in optimizer.state[parameters[0]] if key.startswith("basis")]
    assert parameters[1].isfinite().all()


def test_transposed_weights():
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain, transposed = nn.Parameter(start.clone()), nn.Parameter(start.T.contiguous().T)
    for parameter in (plain, transposed):
        train(NGD([parameter], weight_decay=0.1), [parameter], range(5))
    assert transposed.stride() == (1, 6)
    torch.testing.assert_close(transposed, plain)


@each_foreach
@pytest.mark.parametrize("columns", [slice(2, 6), 8], ids=["matrix", "vector"])
def test_weights_that_are_a_part_of_a_larger_tensor(foreach, columns):
    """PyTorch's fused kernel takes weights for dense, and would write to what lies between.

    Such weights are rare: to refuse them is as good as to take them.
    """
    whole = torch.zeros(6, 9)
    part, alone = nn.Parameter(whole[:, columns]), nn.Parameter(whole[:, columns].clone())
    train(NGD([alone], foreach=foreach), [alone], range(5))
    try:
        train(NGD([part], foreach=foreach), [part], range(5))
        torch.testing.assert_close(part, alone)
    except (RuntimeError, ValueError) as error:
        assert "NGD" in str(error)
    whole[:, columns] = 0
    assert not whole.any()


# ---- saving -------------------------------------------------------------------------------------


@each_foreach
@pytest.mark.parametrize("steps", [0, 1, 9, 10, 13])
def test_a_loaded_state_goes_on_bit_equal(foreach, steps):
    settings = {"lr": 0.05, "weight_decay": 0.1, "foreach": foreach}
    parameters = weights()
    optimizer = NGD(parameters, **settings)
    train(optimizer, parameters, range(steps))
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    loaded = NGD(again, lr=7.0, alpha=1.0)  # whose settings come with the state
    if steps == 13:  # one that has a history of its own
        give_gradients(again, 50)
        loaded.step()
        for one, other in zip(again, parameters, strict=True):
            one.data.copy_(other)
    loaded.load_state_dict(saved_and_read(optimizer.state_dict()))
    train(optimizer, parameters, range(steps, steps + 20))
    train(loaded, again, range(steps, steps + 20))
    assert_equal_to_the_bit(tensors(loaded), tensors(optimizer))


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
def test_copies_of_the_optimizer_go_on_alike(way):
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


@each_foreach
def test_another_rank_needs_another_state(foreach):
    parameters = weights()
    optimizer = NGD(parameters, rank=2, foreach=foreach)
    train(optimizer, parameters, range(3))
    other = NGD(parameters, rank=3, foreach=foreach)
    other.load_state_dict(optimizer.state_dict())  # with its settings, as PyTorch does it
    train(other, parameters, range(3, 5))
    other.param_groups[0]["rank"] = 3
    give_gradients(parameters, 5)
    with pytest.raises(RuntimeError, match="rank"):
        other.step()


# ---- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1), ("lr", float("nan")), ("momentum", -0.1), ("momentum", 1.0),
        ("weight_decay", -1e-4), ("alpha", 0.0), ("alpha", -1.0), ("alpha", float("nan")),
        ("alpha", float("inf")), ("rank", 0), ("rank", -3), ("rank", 2.5), ("update_period", 0),
        ("update_period", 2.5), ("eta", 0.0), ("eta", 1.5), ("axes", "rows"), ("axes", None),
        ("norm", "natural"), ("products", "bf16"),
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


@each_foreach
@pytest.mark.parametrize("when", ["first", "later"])
def test_sparse_gradients_are_refused(foreach, when):
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = NGD(embedding.parameters(), foreach=foreach)
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
