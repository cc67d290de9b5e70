"""Steps of every optimizer: by its formula in float64, without a trace where flagged, resumed."""

import copy
import functools
import json

import pytest
import torch
from optimizer_formulas import AdamW, Lamb, Lookahead, Madgrad, NovoGrad, Sgd
from optimizer_tools import (
    LR,
    VARIANTS,
    K,
    backward,
    bits,
    build,
    each_optimizer,
    poison,
    same,
    small_model,
)
from torch import nn

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.errors import UserError
from utils.optim.factory import build_optimizer
from utils.reporting.metrics import to_json

# muon has its own test below, ngd its own files; those of Apex are others of these
# (test_apex.py).
REFERENCES = {
    "sgd": Sgd,
    "adamw": AdamW,
    "lamb": Lamb,
    "madgrad": Madgrad,
    "fusednovograd": NovoGrad,
}


def reference(name: str, momentum: float):
    inner = REFERENCES[name.split()[-1]](momentum)
    return Lookahead(inner, K) if "lookahead" in name else inner


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split()[-1] in REFERENCES])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_equals_its_formula(name, channels_last, decay_all, momentum):
    model = small_model(channels_last)
    optimizer = build(name, model, decay_all=decay_all, momentum=momentum)
    plain = [parameter.detach().clone() for parameter in model.parameters()]
    references = [reference(name, momentum) for _ in plain]
    for step in range(20):
        backward(model, step)
        lr = LR[name.split()[-1]] / (1 + step)  # as a schedule changes it
        for group in optimizer.param_groups:
            group["lr"] = lr
        for index, parameter in enumerate(model.parameters()):
            decay = 0.1 if decay_all or parameter.ndim > 1 else 0.0
            plain[index] = references[index].step(plain[index], parameter.grad, lr, decay)
        optimizer.step()  # which may change the gradients
    torch.testing.assert_close(list(model.parameters()), plain, rtol=0, atol=1e-12)


def quintic(s):
    """The singular values after five Newton-Schulz steps, with coefficients that bring them near
    to 1 (https://leloykun.github.io/ponder/muon-opt-coeffs/)."""
    for a, b, c in (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ):  # fmt: skip
        s = a * s + b * s**3 + c * s**5
    return s


def test_muon_turns_gradients_into_orthogonal_matrices():
    """b = m b + (1 - m) g;  u = (1 - m) g + m b;  p = p - lr wd p - lr 0.2 sqrt(max(shape)) O(u),
    where O sets the singular values of the flattened kernel to about 1 (in bfloat16)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Linear(9, 12), nn.Linear(12, 5))
    model = model.double().to(memory_format=torch.channels_last)
    lr, decay, momentum = 0.05, 0.1, 0.95
    optimizer = build_optimizer("muon", model, lr=lr, weight_decay=decay)
    for weight in (model[0].weight, model[1].weight):
        rows = weight.shape[0]
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            before = weight.detach().clone()
            buffer = optimizer.state.get(weight, {}).get("momentum_buffer", torch.zeros(()))
            buffer = momentum * buffer + (1 - momentum) * weight.grad
            u = (1 - momentum) * weight.grad + momentum * buffer
            left, s, right = torch.linalg.svd(u.reshape(rows, -1), full_matrices=False)
            step = left @ (quintic(s / s.norm())[:, None] * right)
            scale = 0.2 * max(step.shape) ** 0.5
            optimizer.step()
            done = before * (1 - lr * decay) - weight.detach()
            torch.testing.assert_close(
                done.reshape(rows, -1) / (lr * scale), step, rtol=0, atol=0.03
            )


def test_muon_leaves_all_but_hidden_matrices_to_adam():
    """Vectors, kernels of one channel, and the classifier; as Adam with Nesterov momentum."""
    model = small_model()
    optimizer = build("muon", model)
    backward(model, 0)
    before, last = model[6].weight.detach().clone(), model[6].weight
    optimizer.step()
    uses = {name: optimizer.state[p]["use_muon"] for name, p in model.named_parameters()}
    assert [name for name, muon in uses.items() if muon] == ["0.weight", "3.weight"]
    g = last.grad
    m = (0.9 * 0.1 * g + 0.1 * g) / (1 - 0.9)
    expected = before * (1 - 0.01 * 0.1) - 0.01 * m / (g.abs() + 1e-7)
    torch.testing.assert_close(last.detach(), expected, rtol=1e-9, atol=1e-12)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 4]


@each_optimizer
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("inputs_channels_last", [False, True])
def test_gradients_and_state_lie_in_memory_as_their_weights(
    name, channels_last, inputs_channels_last
):
    """Fused kernels go through memory, and would combine the wrong elements in another order."""
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
        state = [torch.as_tensor(value) for value in optimizer.state[p].values()]
        state = [value for value in state if value.shape == p.shape]
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
    # Running statistics are not compared.
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


# ---- saving and resuming ------------------------------------------------------------------------


def train(model, optimizer, steps) -> None:
    for step in steps:
        backward(model, step)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] / (1 + step)
        optimizer.step()


def through_checkpoint(optimizer, again, model, other) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors, rest = optimizer_tensors(optimizer, names)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    rest = json.loads(to_json(rest))
    restore_optimizer(again, {p: name for name, p in other.named_parameters()}, tensors, rest)
    for tensor in tensors.values():  # what was read must have been copied
        tensor.zero_()


def through_state_dict(optimizer, again, model, other) -> None:
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@functools.cache  # every stop and way is compared with the same run
def uninterrupted(name, channels_last):
    """The model and the optimizer after seven steps."""
    model = small_model(channels_last, torch.float32)
    optimizer = build(name, model)
    train(model, optimizer, range(7))
    return model, optimizer


@each_optimizer
@pytest.mark.parametrize(
    ("way", "channels_last", "stop"),
    [
        (through_checkpoint, True, 0),
        (through_checkpoint, False, 1),
        (through_checkpoint, True, 4),
        (through_state_dict, False, 0),
        (through_state_dict, True, 1),
        (through_state_dict, False, 4),
    ],
)
def test_resumed_is_uninterrupted_to_the_bit(name, way, channels_last, stop):
    whole, expected = uninterrupted(name, channels_last)
    model = small_model(channels_last, torch.float32)
    optimizer = build(name, model)
    train(model, optimizer, range(stop))
    other = small_model(channels_last, torch.float32)
    with torch.no_grad():  # the slow weights must come from what is saved
        for parameter in other.parameters():
            parameter.add_(1.0)
    again = build(name, other)
    other.load_state_dict(model.state_dict())
    way(optimizer, again, model, other)
    for parameter, values in again.state.items():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert value.stride() == parameter.stride()
    train(other, again, range(stop, 7))
    assert same(bits(other, again), bits(whole, expected))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in again.param_groups]
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in expected.param_groups]


def test_a_resumed_run_may_have_another_update_period():
    """No state depends on it: the one of the new start holds from there on."""
    model, other = small_model(), small_model()
    optimizer, again = build("ngd", model), build("ngd", other, ngd_update_period=3)
    train(model, optimizer, range(12))
    other.load_state_dict(model.state_dict())
    through_checkpoint(optimizer, again, model, other)
    assert {group["update_period"] for group in again.param_groups} == {3}
    before = again.state[other[0].weight]["spectrum_0"].clone()
    train(other, again, [12])  # 12 is a multiple of 3, 13 and 14 are not
    after = again.state[other[0].weight]["spectrum_0"].clone()
    train(other, again, [13, 14])
    assert not torch.equal(after, before)
    assert torch.equal(again.state[other[0].weight]["spectrum_0"], after)


@each_optimizer
def test_a_checkpoint_of_other_parameters_is_refused(name):
    model, other = small_model(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    with pytest.raises(UserError, match="has other parameters"):
        through_checkpoint(build(name, model), build(name, other), model, other)
