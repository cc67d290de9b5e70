"""Lookahead: its own rules; its formula is tested in test_optimizer_steps.py."""

import copy
import pickle

import pytest
import torch
from flags_of_a_gpu import flags_as_on_a_gpu
from torch import nn

from utils.checkpoints.states import OF_THE_STEPS
from utils.optim import lookahead
from utils.optim.lookahead import COUNT, SLOW, Lookahead


def problem(k=2, alpha=0.5):
    model = nn.Linear(3, 2, dtype=torch.float64)
    return model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), k, alpha)


def step(model, optimizer, number=0):
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
    optimizer.step()


def test_alpha_of_one_is_the_optimizer_alone():
    model, optimizer = problem(alpha=1.0)
    plain = copy.deepcopy(model)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(5):
        step(model, optimizer, number)
        step(plain, alone, number)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


def test_between_synchronisations_it_is_the_optimizer_alone():
    model, optimizer = problem(k=3)
    start = model.weight.detach().clone()
    plain = copy.deepcopy(model)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        step(model, optimizer, number)
        step(plain, alone, number)
    assert torch.equal(model.weight, plain.weight)
    step(model, optimizer, 2)
    step(plain, alone, 2)
    torch.testing.assert_close(model.weight, (start + plain.weight) / 2)
    assert torch.equal(optimizer.state[model.weight]["slow_weight"], model.weight)


@pytest.mark.parametrize(("k", "alpha"), [(0, 0.5), (2, 0.0), (2, 1.5)])
def test_values_out_of_range_are_refused(k, alpha):
    with pytest.raises(ValueError, match="Lookahead takes k of 1 or more"):
        problem(k, alpha)


def test_a_group_may_be_added_later():
    model, optimizer = problem(k=2)
    late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    step(model, optimizer)
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    assert [group["lookahead_step"] for group in optimizer.param_groups] == [1, 1]
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.defaults is optimizer.optimizer.defaults
    late.grad = torch.ones_like(late)
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full_like(late, 0.75))  # (1 + 0.5) / 2
    optimizer.zero_grad()
    assert late.grad is None and model.weight.grad is None


def test_frozen_weights_stay():
    model, optimizer = problem(k=1)
    model.bias.requires_grad_(False)
    before = model.bias.detach().clone()
    for number in range(4):
        step(model, optimizer, number)
    assert torch.equal(model.bias, before)


def test_a_state_without_slow_weights_is_refused():
    model, optimizer = problem()
    step(model, optimizer)
    with pytest.raises(KeyError):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_step_that_the_device_leaves_out_counts_and_changes_nothing(left_out):
    """With k=2 the second step synchronizes."""
    model, _ = problem()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), k=2)
    for number in range(1, left_out):
        step(model, optimizer, number)
    before = [tensor.clone() for tensor in (*model.parameters(), *optimizer._slow.values())]
    optimizer.found_inf = torch.ones(())
    with flags_as_on_a_gpu(lookahead):
        step(model, optimizer, left_out)
    assert all(map(torch.equal, before, (*model.parameters(), *optimizer._slow.values())))
    assert optimizer.param_groups[0][COUNT] == left_out
    optimizer.found_inf.zero_()
    with flags_as_on_a_gpu(lookahead):
        for number in range(left_out, 4):
            step(model, optimizer, number)
    assert torch.equal(optimizer.state[model.weight][SLOW], model.weight)


def test_its_count_is_saved_in_checkpoints():
    assert COUNT in OF_THE_STEPS


# ---- copies and hooks, as for any optimizer -----------------------------------------------------


def copied(both: dict, way: str) -> dict:
    return copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_takes_the_same_steps_independently(way):
    model, optimizer = problem(k=3, alpha=0.25)
    for number in range(4):
        step(model, optimizer, number)
    both = copied({"model": model, "optimizer": optimizer}, way)
    other, again = both["model"], both["optimizer"]
    assert isinstance(again, Lookahead) and (again.k, again.alpha) == (3, 0.25)
    before = model.weight.detach().clone()
    for number in range(4, 7):
        step(other, again, number)
    assert torch.equal(model.weight, before) and not torch.equal(other.weight, before)
    for number in range(4, 7):  # the original
        step(model, optimizer, number)
    for one, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(again.state[one][SLOW], optimizer.state[expected][SLOW])
    assert again.param_groups[0][COUNT] == optimizer.param_groups[0][COUNT] == 7
    fresh = problem()  # and a new one
    step(*fresh)
    assert fresh[1].param_groups[0][COUNT] == 1


def test_step_hooks_belong_to_one_instance():
    (model, optimizer), other, called = problem(), problem(), []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step(*other)
    assert not called
    step(model, optimizer)
    handle.remove()
    step(model, optimizer)
    assert called == ["before", "after", "before"]


def test_a_schedule_of_pytorch_works_with_it():
    model, optimizer = problem()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(3):
        step(model, optimizer, number)
        schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
