"""MADGRAD against timm's, its launches on a GPU, and checkpoints of when it was timm's."""

import copy

import pytest
import timm.optim
import torch
from launches import launches_of_a_step
from optimizer_tools import backward, build, small_model
from torch import nn

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.optim.factory import parameter_groups
from utils.optim.madgrad_steps import Madgrad


def timms(model: nn.Module, momentum: float = 0.9, decay_all: bool = False):
    groups = parameter_groups(model, 0.1, decay_all)
    return timm.optim.MADGRAD(groups, lr=0.01, momentum=momentum)


def both_step(ours, theirs, optimizers, first: int, last: int) -> None:
    """With the same gradients: the convolution's bias, before BatchNorm, has nothing but rounding
    errors, which MADGRAD magnifies."""
    for step in range(first, last):
        backward(theirs, step)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = None if other.grad is None else other.grad.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + step)
            optimizer.step()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_it_equals_timms(momentum, decay_all, channels_last):
    ours = small_model(channels_last)
    theirs = copy.deepcopy(ours)
    optimizer = build("madgrad", ours, momentum=momentum, decay_all=decay_all)
    both_step(ours, theirs, (optimizer, timms(theirs, momentum, decay_all)), 0, 50)
    assert_equal(ours, theirs)


def test_parameters_that_join_later_count_their_own_steps():
    ours = small_model()
    theirs = copy.deepcopy(ours)
    optimizers = build("madgrad", ours), timms(theirs)
    theirs[0].requires_grad_(False)
    both_step(ours, theirs, optimizers, 0, 3)
    theirs[0].requires_grad_(True)
    both_step(ours, theirs, optimizers, 3, 6)
    assert optimizers[0].state[ours[0].weight]["step"] == 3
    assert optimizers[0].state[ours[3].weight]["step"] == 6
    assert_equal(ours, theirs)


def test_parameters_of_other_dtypes_and_views_are_stepped():
    torch.manual_seed(0)
    wide = torch.randn(6, 8, dtype=torch.float64)
    parameters = [
        nn.Parameter(wide.clone()),
        nn.Parameter(wide[:, ::2]),
        nn.Parameter(torch.ones(3)),
    ]
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    ours = Madgrad([{"params": parameters, "weight_decay": 0.1}], lr=0.01)
    theirs = timm.optim.MADGRAD([{"params": copies, "weight_decay": 0.1}], lr=0.01)
    for _ in range(3):
        for one, other in zip(parameters, copies, strict=True):
            other.grad = torch.randn(one.shape, dtype=one.dtype)
            one.grad = other.grad.clone()
        ours.step(), theirs.step()
    for one, other in zip(parameters, copies, strict=True):
        tolerance = 1e-10 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=tolerance)


def test_a_checkpoint_of_timms_goes_on():
    """Runs that were started before MADGRAD was ours."""
    theirs = small_model()
    optimizer = timms(theirs)
    both_step(copy.deepcopy(theirs), theirs, (optimizer,), 0, 5)
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    tensors, rest = optimizer_tensors(optimizer, names)
    ours = copy.deepcopy(theirs)
    names = {parameter: name for name, parameter in ours.named_parameters()}
    resumed = build("madgrad", ours)
    restore_optimizer(resumed, names, tensors, rest)
    both_step(ours, theirs, (optimizer, resumed), 5, 10)
    assert {float(state["step"]) for state in resumed.state.values()} == {10.0}
    assert_equal(ours, theirs)


@pytest.mark.parametrize("decay_all", [True, False])
def test_launches_of_a_step(decay_all):
    """timm's launches 2,955."""
    launches = launches_of_a_step("madgrad", decay_all=decay_all)
    assert launches.total() <= 55, launches


def test_parameters_without_a_gradient_count_no_step():
    """They share their count with the others until then."""
    model = small_model()
    optimizer = build("madgrad", model)
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        backward(model, 0)
        optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1
    assert optimizer.state[model[3].weight]["step"] == 2
