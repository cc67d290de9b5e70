"""Every optimizer of the factory against its formula in plain float64, step by step."""

import copy

import pytest
import torch
from torch import nn

from utils.optim.factory import OPTIMIZERS, build_optimizer, parameter_groups


class Sgd:
    """g' = g + wd p;  b = m b + g', from b = 0;  p = p - lr (g' + m b)."""

    lr = 0.1

    def __init__(self, momentum):
        self.momentum, self.buffer = momentum, 0.0

    def step(self, p, g, lr, decay):
        g = g + decay * p
        self.buffer = self.momentum * self.buffer + g
        return p - lr * (g + self.momentum * self.buffer)


class AdamW:
    """p = p - lr wd p - lr m' / (sqrt(v') + eps), with m' and v' free of their start's bias."""

    lr = 0.01

    def __init__(self, momentum):
        self.m, self.v, self.t = 0.0, 0.0, 0

    def step(self, p, g, lr, decay):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return p - lr * decay * p - lr * m / (v.sqrt() + 1e-8)


REFERENCES = {"sgd": Sgd, "adamw": AdamW}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def small_model(channels_last=False, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1, bias=False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(dtype=dtype, memory_format=memory_format)


def backward(model: nn.Module, step: int) -> None:
    """Fresh gradients, the same for the same weights and step."""
    generator = torch.Generator().manual_seed(step)
    parameter = next(model.parameters())
    inputs = torch.randn(5, 3, 7, 7, generator=generator, dtype=parameter.dtype)
    if parameter.is_contiguous(memory_format=torch.channels_last):
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 3, 0])).backward()


def poison(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad.fill_(float("nan") if index % 2 else float("inf"))


def build(name, model, **settings):
    settings = {"lr": REFERENCES[name].lr, "weight_decay": 0.1} | settings
    return build_optimizer(name, model, **settings)


def bits(model, optimizer) -> list[torch.Tensor]:
    """Copies of all parameters and of their state, in a fixed order."""
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        tensors += [state[key].clone() for key in sorted(state)]
    return tensors


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@each_optimizer
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_equals_its_formula(name, channels_last, decay_all, momentum):
    model = small_model(channels_last)
    optimizer = build(name, model, decay_all=decay_all, momentum=momentum)
    plain = [parameter.detach().clone() for parameter in model.parameters()]
    references = [REFERENCES[name](momentum) for _ in plain]
    for step in range(20):
        backward(model, step)
        lr = REFERENCES[name].lr / (1 + step)  # as a schedule changes it
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for index, parameter in enumerate(model.parameters()):
            decay = 0.1 if decay_all or parameter.ndim > 1 else 0.0
            plain[index] = references[index].step(plain[index], parameter.grad, lr, decay)
    torch.testing.assert_close(list(model.parameters()), plain, rtol=1e-10, atol=1e-12)


@each_optimizer
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("inputs_channels_last", [False, True])
def test_gradients_and_state_lie_in_memory_as_their_weights(
    name, channels_last, inputs_channels_last
):
    """The fused kernels walk through memory, and would mix elements that lie in another order."""
    model = small_model(channels_last)
    optimizer = build(name, model)
    order = torch.channels_last if inputs_channels_last else torch.contiguous_format
    for _ in range(2):
        model(
            torch.randn(5, 3, 7, 7, dtype=torch.float64).contiguous(memory_format=order)
        ).sum().backward()
        optimizer.step()
    for p in model.parameters():
        assert p.grad.stride() == p.stride()
        state = [value for value in optimizer.state[p].values() if value.shape == p.shape]
        assert state and all(value.stride() == p.stride() for value in state)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flagged_step_leaves_everything_to_the_bit(name, dtype):
    model = small_model(True, dtype)
    optimizer = build(name, model)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    before, backup = bits(model, optimizer), copy.deepcopy(optimizer.state_dict())
    poison(model)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert same(bits(model, optimizer), before)
    assert optimizer.state_dict()["param_groups"] == backup["param_groups"]


@each_optimizer
def test_flagged_first_step_is_as_if_it_had_not_been(name):
    runs = []
    for flagged_first in (True, False):
        model = small_model(True, torch.float32)
        optimizer = build(name, model)
        untouched = [parameter.detach().clone() for parameter in model.parameters()]
        if flagged_first:
            backward(copy.deepcopy(model), 0)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            poison(model)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            assert same([p.detach() for p in model.parameters()], untouched)
        optimizer.found_inf = torch.zeros(())
        for step in range(3):
            backward(model, step)
            optimizer.step()
        runs.append(bits(model, optimizer))
    # The running statistics are no parameters: both runs saw the same batches.
    assert same(*runs)


@each_optimizer
def test_flag_of_zero_equals_no_flag(name):
    runs = []
    for flag in (torch.zeros(()), None):
        model = small_model(True, torch.float32)
        optimizer = build(name, model)
        if flag is not None:
            optimizer.found_inf = flag
        for step in range(5):
            backward(model, step)
            optimizer.step()
        runs.append(bits(model, optimizer))
    assert same(*runs)


def test_momentum_zero_is_plain_gradient_descent():
    model = small_model()
    optimizer = build("sgd", model, momentum=0.0, weight_decay=0.0, lr=0.5)
    for step in range(3):
        backward(model, step)
        expected = [(p - 0.5 * p.grad).detach() for p in model.parameters()]
        optimizer.step()
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)
    assert not any(optimizer.state.values())


def test_no_decay_on_vectors_unless_asked():
    model = small_model()
    decayed, others = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    [everything] = parameter_groups(model, 0.1, decay_all=True)
    assert everything["weight_decay"] == 0.1
    assert everything["params"] == list(model.parameters())


@each_optimizer
def test_frozen_parameters_are_left_out(name):
    model = small_model()
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = build(name, model)
    backward(model, 0)
    optimizer.step()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert torch.equal(model[0].weight, frozen)


@each_optimizer
def test_groups_keep_the_peak_rate(name):
    optimizer = build(name, small_model(), lr=0.025)
    assert [group["base_lr"] for group in optimizer.param_groups] == [0.025, 0.025]
