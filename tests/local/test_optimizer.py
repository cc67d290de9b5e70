"""LocalOptimizer in one process; several: tests/distributed/test_local_ranks.py.

The outer optimizer against PyTorch's SGD, to the bit where the arithmetic is the same.
"""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from utils.exchange import Exchange
from utils.local.optimizer import LocalOptimizer, OuterOptimizer, average_
from utils.local.rules import SyncRule, simulate
from utils.optim.schedules import Schedule

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


class Workers(Exchange):
    """A worker of several, alone: its means are its own values."""

    size = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def backward(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(inputs), torch.arange(6) % 3)
    loss.backward()
    return loss


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def local(model: nn.Module, name: str = "adamw", **values) -> LocalOptimizer:
    values = {"warmup_steps": 0, "total_steps": 30, "exchange": Exchange()} | values
    return LocalOptimizer(OPTIMIZERS[name](model.parameters()), **values)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("values", [{"init_h": 1}, {"init_h": 7}, {"alpha": 0.02, "min_h": 2}])
@pytest.mark.parametrize("exchange", [Exchange(), Workers()])
def test_one_process_takes_the_steps_of_the_plain_optimizer(name, values, exchange):
    ours, theirs = network(), network()
    mine, plain = (
        local(ours, name, exchange=exchange, **values),
        OPTIMIZERS[name](theirs.parameters()),
    )
    for step in range(30):
        for model, optimizer in ((ours, mine), (theirs, plain)):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(weights(ours), weights(theirs))


@given(
    steps=st.integers(1, 80), warmup=st.integers(0, 20), base=st.integers(1, 6),
    alpha=st.floats(0.001, 3.0), power=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from(["cosine", "linear", "constant"]), calls_adjust=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_rounds_are_those_of_the_rule(steps, warmup, base, alpha, power, schedule, calls_adjust):
    """Whether the loop calls adjust_h, as that of the paper's repository does, or not."""
    rule = SyncRule("qsr", steps, base, alpha, power, peak_lr=0.1, warmup_steps=warmup)
    factor = Schedule(schedule, steps, warmup).factor
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = LocalOptimizer(
        torch.optim.SGD([parameter], 0.1 * factor(0)), warmup, steps, alpha, power, base,
        init_h=rule.round_length(0, 0.1) if warmup else 1, exchange=Exchange(),
    )  # fmt: skip
    ends = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * factor(step)
        if calls_adjust:
            optimizer.adjust_h()
        if optimizer.step():
            ends.append(step + 1)
    expected = simulate(rule, lambda step: 0.1 * factor(step))
    assert ends == [*itertools.accumulate(expected)]
    assert optimizer.step(), "beyond the run workers average in every step"


def test_a_scheduler_of_pytorch_can_drive_it():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = LocalOptimizer(
        torch.optim.SGD([parameter], 0.1), 0, 20, alpha=0.1, exchange=Exchange()
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    lengths = []
    for _ in range(20):
        parameter.grad = torch.ones(2)
        if optimizer.step():
            lengths.append(optimizer.h)
        scheduler.step()
    assert lengths == [1] * 5 + [4, 4, 7]  # the last round is cut


def test_h_does_not_change_inside_a_round():
    model = network()
    optimizer = local(model, init_h=4)
    backward(model, 0)
    assert not optimizer.step()
    optimizer.init_h = 2
    optimizer.adjust_h()
    assert (optimizer.h, optimizer.local_step_cnt, optimizer.step_ctr) == (4, 1, 1)


def test_a_closure_is_passed_on():
    ours, theirs = network(), network()
    optimizer, plain = local(ours), OPTIMIZERS["adamw"](theirs.parameters())
    assert optimizer.step(lambda: backward(ours, 0)) is True
    plain.step(lambda: backward(theirs, 0))
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("values", [{"init_h": 4}, {"alpha": 0.02, "min_h": 3}, {"init_h": 5}])
def test_resumed_inside_a_round(values, tmp_path):
    """By a state without pickles, with the learning rate of another step."""
    outer = values == {"init_h": 5}

    def build(model):
        return local(model, **values, outer=OuterOptimizer(model.parameters()) if outer else None)

    def train(model, optimizer, first: int, last: int) -> list[bool]:
        averaged = []
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 30)
            backward(model, step)
            averaged.append(optimizer.step())
            optimizer.zero_grad()
        return averaged

    whole = network()
    expected = train(whole, build(whole), 0, 30)
    model = network()
    optimizer = build(model)
    before = train(model, optimizer, 0, 7)
    assert optimizer.local_step_cnt > 0
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved")
    again = network()
    resumed = build(again)
    of_model, of_optimizer = torch.load(tmp_path / "saved", weights_only=True)
    again.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    assert before + train(again, resumed, 7, 30) == expected
    assert torch.equal(weights(again), weights(whole))


def test_states_of_other_optimizers():
    model = network()
    backward(model, 0)
    plain = OPTIMIZERS["adamw"](model.parameters())
    plain.step()
    optimizer = local(model, step_ctr=9, init_h=3)
    optimizer.load_state_dict(plain.state_dict())
    assert (optimizer.step_ctr, optimizer.h) == (9, 3)
    assert len(optimizer.state) == len(plain.state)
    # As the paper's repository saves it.
    optimizer.load_state_dict(plain.state_dict() | {"h": 5, "step_ctr": 20, "warmup_steps": 0})
    assert (optimizer.step_ctr, optimizer.h, optimizer.local_step_cnt) == (20, 5, 0)
    with_outer = local(model, outer=OuterOptimizer(model.parameters()))
    for one, other in ((optimizer, with_outer), (with_outer, optimizer)):
        with pytest.raises(ValueError, match="outer"):
            one.load_state_dict(other.state_dict())


def test_the_loop_of_the_papers_repository(monkeypatch):
    """Its keywords, without an exchange, and its calls."""
    ours, theirs = network(), network()
    plain = OPTIMIZERS["adamw"](theirs.parameters())
    optimizer = LocalOptimizer(
        optim=OPTIMIZERS["adamw"](ours.parameters()), warmup_steps=0, total_steps=20, alpha=0.02,
        power=2, min_h=2, init_h=1, step_ctr=3, optim_fields_to_average=["exp_avg", "exp_avg_sq"],
    )  # fmt: skip
    lengths = []
    for step in range(12):
        backward(theirs, step)
        plain.step()
        plain.zero_grad()
        backward(ours, step)
        averaged = optimizer.step()
        optimizer.zero_grad()
        if averaged:
            optimizer.adjust_h()
            lengths.append(optimizer.get_local_step())
    assert lengths == [4] * 3 and optimizer.step_ctr == 15
    assert torch.equal(weights(ours), weights(theirs))
    # Several processes without a process group: they would train alone.
    optimizer.exchange = None
    monkeypatch.setenv("WORLD_SIZE", "2")
    backward(ours, 0)
    with pytest.raises(RuntimeError, match="init_process_group"):
        for _ in range(optimizer.get_local_step()):
            optimizer.step()


def test_a_copy_is_independent():
    model = network()
    optimizer = local(model, init_h=3)
    other = copy.deepcopy(optimizer)
    backward(model, 0)
    optimizer.step()
    assert (other.step_ctr, other.h) == (0, 3)
    assert not other.step() and not other.step() and other.step()


def test_an_averaging_keeps_memory_format_and_storage():
    """A strided tensor is averaged in its logical order, in place; there is one collective for each
    dtype."""

    class Counted(Workers):
        sizes: list[int] = []  # noqa: RUF012

        def mean(self, tensor):
            self.sizes.append(len(tensor))
            return tensor + 1

    picture = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = [picture, torch.zeros((), dtype=torch.float64), torch.ones(3), torch.ones(0)]
    expected, places = [t + 1 for t in tensors], [t.data_ptr() for t in tensors]
    average_(tensors, Counted())
    assert Counted.sizes == [96 + 3, 1]
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
    assert [t.data_ptr() for t in tensors] == places
    assert picture.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"total_steps": 0}, "1 or more"),
        ({"init_h": 0}, "1 or more"),
        ({"alpha": -1.0}, "0 or more"),
        ({"alpha": float("nan")}, "0 or more"),
        ({"warmup_steps": -1}, "0 or more"),
    ],
)
def test_wrong_values_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        local(network(), **wrong)


def test_alpha_with_an_outer_optimizer_is_refused():
    model = network()
    with pytest.raises(ValueError, match="rounds of one length"):
        local(model, alpha=0.1, outer=OuterOptimizer(model.parameters()))


@pytest.mark.parametrize(
    ("field", "said"), [("exp_agv", "it has .*exp_avg"), ("step", "parameter's shape")]
)
def test_wrong_fields_are_refused(field, said):
    model = network()
    optimizer = local(model, exchange=Workers(), optim_fields_to_average=[field])
    backward(model, 0)
    with pytest.raises(ValueError, match=said):
        optimizer.step()


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def moved(now, seed: int) -> None:
    """Stands for a round of local steps and the averaging."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in now:
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.3, 0.0)])
def test_the_steps_are_those_of_sgd_along_the_difference(lr, momentum):
    ours, theirs = parameters(), parameters()
    outer = OuterOptimizer(ours, lr, momentum)
    sgd = torch.optim.SGD(theirs, lr, momentum, nesterov=momentum > 0)
    for seed in range(5):
        moved(ours, seed)
        for p, now in zip(theirs, ours, strict=True):
            p.grad = p.detach() - now.detach()
        outer.step()
        sgd.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_rate_one_without_momentum_is_the_mean():
    ours = [p.double() for p in parameters()]
    outer = OuterOptimizer(ours, lr=1.0, momentum=0.0)
    moved(ours, 1)
    mean = [p.detach().clone() for p in ours]
    outer.step()
    torch.testing.assert_close(ours, mean, rtol=1e-12, atol=1e-12)


def test_resumed_steps_are_equal():
    ours, resumed = parameters(), parameters()
    outer = OuterOptimizer(ours)
    moved(ours, 0)
    outer.step()
    other = OuterOptimizer(resumed)
    other.load_state_dict(outer.state_dict())
    with torch.no_grad():
        for p, now in zip(resumed, ours, strict=True):
            p.copy_(now)
    for now, optimizer in ((ours, outer), (resumed, other)):
        moved(now, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, resumed, strict=True))


def test_states_of_other_parameters_and_wrong_values_are_refused():
    with pytest.raises(ValueError, match="other parameters"):
        OuterOptimizer(parameters()).load_state_dict(OuterOptimizer(parameters()[:2]).state_dict())
    for wrong in ({"lr": 0.0}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match="momentum in"):
            OuterOptimizer(parameters(), **wrong)
