"""Entries of the table agree with what the optimizers do."""

import dataclasses

import pytest
import torch
from optimizer_tools import backward, build, small_model
from torch import nn

from utils.optim.entry import ELEMENTS, MATRICES
from utils.optim.factory import build_optimizer, is_capturable
from utils.optim.table import OPTIMIZERS

each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@each_optimizer
def test_state_of_whole_parameters_is_known_by_its_names(name):
    """Names alone decide what is divided among ranks, for all optimizers together."""
    own = OPTIMIZERS[name].whole_state
    every = {key for entry in OPTIMIZERS.values() for key in entry.whole_state}
    others = tuple(every.difference(own))
    model = small_model()
    optimizer = build(name, model)
    backward(model, 0)
    optimizer.step()
    keys = {key for state in optimizer.state.values() for key in state}
    assert all(any(key.startswith(prefix) for key in keys) for prefix in own)
    assert not any(key.startswith(others) for key in keys)


@each_optimizer
def test_steps_change_only_the_stated_entries_of_groups(name):
    """A resumed run restores these, and takes all others from its settings."""
    model = small_model()
    optimizer = build(name, model)
    before = [dict(group) for group in optimizer.param_groups]
    for step in range(2):
        backward(model, step)
        optimizer.step()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        changed = {key for key in group if key != "params" and group[key] != old.get(key)}
        assert changed == {*OPTIMIZERS[name].group_state}


def first_rows_stepped(entry, rows: int) -> torch.Tensor:
    """Four rows of a weight after three steps with its first `rows` rows."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)[:rows])
    head = torch.nn.Parameter(torch.ones(2, 2))  # the last matrix, which is the classifier's
    momentum = {} if entry.momentum is None else {"momentum": entry.momentum}
    groups = [{"params": [weight, head], "weight_decay": 0.1}]
    optimizer = entry.make(groups, lr=0.1, **momentum)
    for step in range(3):
        gradient = torch.linspace(1, 3 + step, 48, dtype=torch.float64).sin().view(8, 6)
        weight.grad, head.grad = gradient[:rows], torch.ones(2, 2)
        optimizer.step()
    return weight.detach()[:4]


@each_optimizer
def test_it_states_what_it_needs_of_a_parameter(name):
    """Half of a weight is stepped like that half of the whole, unless more is needed."""
    entry = OPTIMIZERS[name]
    half, whole = first_rows_stepped(entry, 4), first_rows_stepped(entry, 8)
    assert torch.allclose(half, whole, rtol=1e-12, atol=0) is (entry.needs == ELEMENTS)


@each_optimizer
def test_it_is_documented_by_its_entry(name):
    entry = OPTIMIZERS[name]
    assert entry.summary and not entry.summary.endswith(".")
    assert {*entry.ranges} <= {"lr", "weight_decay", "momentum", *entry.own}
    assert {"lr", "weight_decay"} <= {*entry.ranges}


def test_an_exchange_serves_what_needs_whole_matrices():
    divided = {name for name, entry in OPTIMIZERS.items() if entry.can_be_divided}
    assert divided >= {"sgd", "adamw", "lamb", "muon", "madgrad", "ngd"}
    assert OPTIMIZERS["ngd"].needs == OPTIMIZERS["muon"].needs == MATRICES
    assert not dataclasses.replace(OPTIMIZERS["muon"], takes_exchange=False).can_be_divided


def test_lookahead_counts_on_the_host():
    capturable = {name for name in OPTIMIZERS if is_capturable(name, None)}
    assert capturable >= {"sgd", "adamw", "lamb", "muon", "madgrad", "ngd"}
    assert not is_capturable("sgd", 5)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_decays_of_the_averages_and_eps_are_those_of_the_flags(name):
    model = nn.Linear(2, 3)
    usual = build_optimizer(name, model, lr=0.1, weight_decay=0.0).param_groups[0]
    assert (tuple(usual["betas"]), usual["eps"]) == (
        (0.9, 0.999),
        {"adamw": 1e-8, "lamb": 1e-6}[name],
    )
    given = {"betas": "0.8,0.99", "eps": 0.5}
    optimizer = build_optimizer(name, model, lr=0.1, weight_decay=0.0, **given)
    model.weight.grad, model.bias.grad = torch.ones(3, 2), torch.zeros(3)
    before = model.weight.detach().clone()
    optimizer.step()
    # From the first gradient, 1, both averages corrected for their start are 1.
    assert torch.allclose(before - model.weight, torch.full((3, 2), 0.1 / 1.5))


def test_plain_momentum_is_that_of_its_formula():
    weight = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer("sgd", weight, lr=0.1, weight_decay=0.0, nesterov=False)
    start = weight.weight.item()
    for _ in range(2):
        weight.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert weight.weight.item() == pytest.approx(start - 0.1 * (1 + 1.9), abs=1e-6)
