"""LAMB against timm's, its flags, its launches on a GPU, and checkpoints of when it was timm's."""

import copy

import pytest
import timm.optim
import torch
from launches import launches_of_a_step
from optimizer_tools import backward, build, small_model
from torch import nn

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.optim.factory import parameter_groups
from utils.optim.norm_steps import Lamb, trust_ratios


def timms(model: nn.Module, bias_correction: bool, decay_all: bool):
    groups = parameter_groups(model, 0.1, decay_all)
    return timm.optim.Lamb(groups, lr=0.01, bias_correction=bias_correction, max_grad_norm=None)


def steps(model: nn.Module, optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        backward(model, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        optimizer.step()


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_it_equals_timms(bias_correction, decay_all, channels_last):
    """With the same gradients. A bias that starts at 0 has no norm: its first step is Adam's."""
    ours = small_model(channels_last)
    nn.init.zeros_(ours[0].bias)
    theirs = copy.deepcopy(ours)
    optimizer = build("lamb", ours, decay_all=decay_all, lamb_bias_correction=bias_correction)
    reference = timms(theirs, bias_correction, decay_all)
    for step in range(50):
        backward(theirs, step)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = other.grad.clone()
        for each in (optimizer, reference):
            for group in each.param_groups:
                group["lr"] = 0.05 / (1 + step)
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_ratios_of_norms():
    weights, moved = torch.tensor([3.0, 0.0, 2.0, 0.0]), torch.tensor([1.5, 1.0, 0.0, 0.0])
    assert trust_ratios(weights, moved).tolist() == [2.0, 1.0, 1.0, 1.0]


def test_parameters_that_join_later_count_on():
    model = small_model()
    optimizer = build("lamb", model)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    steps(model, optimizer, 0, 3)
    assert model[0].weight not in optimizer.state
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    before = model[0].weight.clone()
    steps(model, optimizer, 3, 4)
    assert not torch.equal(before, model[0].weight)
    assert optimizer.param_groups[0]["step"] == 4


def test_a_setting_that_lamb_lacks_is_refused():
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match="Lamb has no setting 'weight_decy'"):
        Lamb(parameters, lr=0.01, weight_decy=0.1)
    with pytest.raises(TypeError):
        Lamb(parameters, 0.01, 0.1)  # not an exchange


def test_parameters_of_other_dtypes_and_views_are_stepped():
    torch.manual_seed(0)
    wide = torch.randn(6, 8, dtype=torch.float64)
    parameters = [
        nn.Parameter(wide.clone()),
        nn.Parameter(wide[:, ::2]),
        nn.Parameter(torch.ones(3)),
    ]
    plain = [p.detach().clone() for p in parameters]
    ours = Lamb([{"params": parameters, "weight_decay": 0.1}], lr=0.01)
    copies = [nn.Parameter(p) for p in plain]
    theirs = timm.optim.Lamb([{"params": copies, "weight_decay": 0.1}], lr=0.01, max_grad_norm=None)
    for _ in range(3):
        for one, other in zip(parameters, copies, strict=True):
            other.grad = torch.randn(one.shape, dtype=one.dtype)
            one.grad = other.grad.clone()
        ours.step(), theirs.step()
    assert ours.param_groups[0]["step"] == 3
    for one, other in zip(parameters, copies, strict=True):
        tolerance = 1e-10 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=tolerance)


def test_a_checkpoint_of_timms_goes_on():
    """Runs that were started before LAMB was ours."""
    theirs = small_model()
    optimizer = timms(theirs, True, decay_all=False)
    steps(theirs, optimizer, 0, 5)
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    tensors, rest = optimizer_tensors(optimizer, names)
    ours = copy.deepcopy(theirs)
    names = {parameter: name for name, parameter in ours.named_parameters()}
    resumed = build("lamb", ours)
    restore_optimizer(resumed, names, tensors, rest)
    steps(theirs, optimizer, 5, 10)
    steps(ours, resumed, 5, 10)
    assert resumed.param_groups[0]["step"] == 10
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("decay_all", [True, False])
def test_launches_of_a_step(decay_all):
    """timm's launches 3,180."""
    launches = launches_of_a_step("lamb", decay_all=decay_all)
    assert launches.total() <= 40, launches
