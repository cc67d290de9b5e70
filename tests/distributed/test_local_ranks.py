"""LocalOptimizer over real processes: what must equal DDP or training alone, and when workers
communicate."""

import contextlib
import io
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange
from utils.local.optimizer import LocalOptimizer, OuterOptimizer
from utils.local.rules import SyncRule, simulate

SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]
PLAIN, NESTEROV = {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}
DECAY = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}  # coupled
STEPS = 40


def network(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def backward(model: nn.Module, called, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    inputs = inputs.to(next(model.parameters()).dtype)
    nn.functional.cross_entropy(called(inputs).double(), torch.arange(8) % 3).backward()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def train(model, optimizer, data: int, steps=range(STEPS), rates=None) -> list[bool]:
    """Whether the workers averaged, of each step. `data`: the rank whose samples these are."""
    averaged = []
    for step in steps:
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        backward(model, model, step, data)
        averaged.append(optimizer.step())
        optimizer.zero_grad()
    return averaged


# ---- against DDP, training alone, independent runs ----------------------------------------------


def every_step(exchange, values: dict) -> float:
    """The largest difference between the weights of DDP and of rounds of one step."""
    ours, theirs = network(), network()
    optimizer = LocalOptimizer(
        torch.optim.SGD(ours.parameters(), **values), 0, STEPS, exchange=exchange
    )
    assert all(train(ours, optimizer, exchange.rank))
    called = build_strategy("ddp", theirs, exchange).called
    plain = torch.optim.SGD(theirs.parameters(), **values)
    for step in range(STEPS):
        backward(theirs, called, step, exchange.rank)
        plain.step()
        plain.zero_grad()
    return (weights(ours) - weights(theirs)).abs().max().item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("values", [PLAIN, NESTEROV, DECAY], ids=["plain", "nesterov", "decay"])
def test_rounds_of_one_step_are_ddp(worlds, size, values):
    assert max(worlds(size).run(every_step, values)) < 1e-12


def same_data(exchange, name: str) -> bool:
    """Whether rounds of 7 steps end with the weights of training alone, to the bit."""
    ours, theirs = network(), network()
    build = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), **NESTEROV),
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    }[name]
    fields = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}[name]
    optimizer = LocalOptimizer(
        build(ours), 0, STEPS, init_h=7, optim_fields_to_average=fields, exchange=exchange
    )
    averaged = train(ours, optimizer, data=0)
    assert [step + 1 for step, done in enumerate(averaged) if done] == [7, 14, 21, 28, 35, 40]
    train(theirs, build(theirs), data=0)
    return torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_equal_data_is_training_alone(worlds, size, name):
    assert all(worlds(size).run(same_data, name))


def by_default(exchange) -> float:
    """How far the weights after a round without an exchange are from those with it."""
    ends = []
    for given in ({"exchange": exchange}, {}):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), **NESTEROV)
        train(model, LocalOptimizer(sgd, 0, 4, init_h=4, **given), exchange.rank, range(4))
        ends.append(weights(model))
    return (ends[0] - ends[1]).abs().max().item()


def test_the_default_is_the_default_process_group(worlds):
    assert worlds(2).run(by_default) == [0.0, 0.0]


def one_round(exchange, init_h: int) -> tuple[float, float]:
    """How far the weights are from the mean of runs that each worker takes alone, and from the
    nearest of these."""
    ours = network()
    optimizer = LocalOptimizer(
        torch.optim.AdamW(ours.parameters(), 0.01), 0, STEPS, init_h=init_h, exchange=exchange
    )
    assert train(ours, optimizer, exchange.rank) == [False] * (STEPS - 1) + [True]
    alone = []
    for rank in range(exchange.size):
        model = network()
        train(model, torch.optim.AdamW(model.parameters(), 0.01), rank)
        alone.append(weights(model))
    distances = [(weights(ours) - one).abs().max().item() for one in alone]
    mean = torch.stack(alone).mean(0)
    return (weights(ours) - mean).abs().max().item(), min(distances)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("init_h", [STEPS, 10 * STEPS])
def test_a_single_round_is_the_mean_of_independent_runs(worlds, size, init_h):
    for from_mean, from_one in worlds(size).run(one_round, init_h):
        assert from_mean < 1e-12
        assert from_one > 1e-3


# ---- workers stay together ----------------------------------------------------------------------


def growing(exchange) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """(ends of rounds, the weights in the middle of one, those at the end) of a run whose learning
    rate falls."""
    model, rates = network(), [0.1 * (1 - step / STEPS) for step in range(STEPS)]
    sgd = torch.optim.SGD(model.parameters(), **NESTEROV)
    optimizer = LocalOptimizer(sgd, 4, STEPS, 0.15, min_h=2, init_h=2, exchange=exchange)
    averaged = train(model, optimizer, exchange.rank, range(5), rates)
    assert not averaged[-1]
    inside = weights(model)
    averaged += train(model, optimizer, exchange.rank, range(5, STEPS), rates)
    return [step + 1 for step, done in enumerate(averaged) if done], inside, weights(model)


@pytest.mark.parametrize("size", SIZES)
def test_workers_part_inside_rounds_and_end_equal(worlds, size):
    rule = SyncRule("qsr", STEPS, 2, 0.15, peak_lr=0.1, warmup_steps=4)
    expected = simulate(rule, lambda step: 0.1 * (1 - step / STEPS))
    assert len({*expected}) > 3
    results = worlds(size).run(growing)
    for ends, _, last in results:
        assert ends == [*itertools.accumulate(expected)]
        assert torch.equal(last, results[0][2])
    for (_, one, _), (_, other, _) in itertools.combinations(results, 2):
        assert not torch.equal(one, other)


def outer_momentum(exchange) -> tuple[torch.Tensor, torch.Tensor]:
    """(the weights of rounds with an outer optimizer, the same by hand)."""
    model, by_hand = network(), network()
    inner = [torch.optim.SGD(m.parameters(), **PLAIN) for m in (model, by_hand)]
    optimizer = LocalOptimizer(
        inner[0], 0, 12, init_h=4, exchange=exchange, outer=OuterOptimizer(model.parameters())
    )
    train(model, optimizer, exchange.rank, range(12))
    momentum = torch.zeros_like(weights(by_hand))
    before = weights(by_hand)
    for first in (0, 4, 8):
        train(by_hand, inner[1], exchange.rank, range(first, first + 4))
        difference = before - exchange.mean(weights(by_hand))
        momentum = 0.9 * momentum + difference
        before = before - 0.7 * (difference + 0.9 * momentum)
        nn.utils.vector_to_parameters(before.clone(), by_hand.parameters())
    return weights(model), before


def test_the_outer_optimizer_steps_along_the_mean(worlds):
    results = worlds(2).run(outer_momentum)
    for ours, by_hand in results:
        torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-12)
        assert torch.equal(ours, results[0][0])


def skipping(exchange) -> tuple[list[bool], torch.Tensor]:
    """(whether the workers averaged, of each step; the weights); rank 1 leaves out three of its own
    steps."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), **PLAIN)
    optimizer = LocalOptimizer(sgd, 0, 10, init_h=4, exchange=exchange)
    averaged = []
    for step in range(10):
        backward(model, model, step, exchange.rank)
        out = exchange.rank == 1 and step in (2, 3, 8)
        averaged.append(optimizer.count_step() if out else optimizer.step())
        optimizer.zero_grad()
    return averaged, weights(model)


def test_a_worker_may_leave_out_its_own_steps(worlds):
    one, other = worlds(2).run(skipping)
    assert one[0] == other[0] == [step in (3, 7, 9) for step in range(10)]
    assert torch.equal(one[1], other[1])


# ---- what is averaged ---------------------------------------------------------------------------


def averaged_fields(exchange, fields: list[str]) -> dict[str, torch.Tensor]:
    """The weights and AdamW's moments after a round. One parameter has no gradient, and another
    value on each rank; another one has no state on rank 0."""
    model = network()
    bias = model[2].bias.requires_grad_(False)
    bias.fill_(exchange.rank)
    model[0].bias.requires_grad_(exchange.rank != 0)
    adamw = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = LocalOptimizer(
        adamw, 0, 3, init_h=3, optim_fields_to_average=fields, exchange=exchange
    )
    train(model, optimizer, exchange.rank, range(3))
    state = adamw.state[model[0].weight]
    return {"weights": weights(model), "frozen": bias, **state}


@pytest.mark.parametrize("fields", [[], ["exp_avg"], ["exp_avg", "exp_avg_sq"]])
def test_moments_are_averaged_where_they_are_named(worlds, fields):
    one, other = worlds(2).run(averaged_fields, fields)
    assert one["frozen"].tolist() == [0.5] * 3
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        assert torch.equal(one[name], other[name]) == (name == "weights" or name in fields)


# ---- resume, communication ----------------------------------------------------------------------


def resumed(exchange, stop: int, with_outer: bool) -> bool:
    """Whether a run that was saved and built anew after `stop` steps ends with the same bits."""

    def build():
        model = network()
        outer = OuterOptimizer(model.parameters()) if with_outer else None
        values = {"init_h": 6} if with_outer else {"alpha": 0.15, "min_h": 2}
        adamw = torch.optim.AdamW(model.parameters(), 0.1)
        return model, LocalOptimizer(adamw, 0, STEPS, **values, exchange=exchange, outer=outer)

    rates = [0.1 * (1 - step / STEPS) for step in range(STEPS)]
    whole = build()
    expected = train(*whole, exchange.rank, rates=rates)
    model, optimizer = build()
    before = train(model, optimizer, exchange.rank, range(stop), rates)
    assert optimizer.local_step_cnt > 0
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    saved.seek(0)
    again = build()
    for part, state in zip(again, torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state)
    after = train(*again, exchange.rank, range(stop, STEPS), rates)
    assert before + after == expected
    return torch.equal(weights(again[0]), weights(whole[0]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_outer", [False, True])
@pytest.mark.parametrize("stop", [3, 15, 37])
def test_resumed_inside_a_round_to_the_bit(worlds, size, stop, with_outer):
    assert all(worlds(size).run(resumed, stop, with_outer))


def collectives(exchange, two_dtypes: bool) -> tuple[list[bool], list[int]]:
    """Of each step: whether the workers averaged, and how often they communicated."""
    model = network()
    if two_dtypes:
        model.append(nn.Module())
        model[3].register_parameter("unused", nn.Parameter(torch.zeros(3)))
        model[3].forward = lambda x: x
    adamw = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = LocalOptimizer(
        adamw, 0, 20, init_h=6, optim_fields_to_average=["exp_avg"], exchange=exchange
    )
    averaged, counts = [], []
    for step in range(20):
        with CommDebugMode() as seen:
            averaged += train(model, optimizer, exchange.rank, range(step, step + 1))
        counts.append(seen.get_total_counts())
    return averaged, counts


@pytest.mark.parametrize("two_dtypes", [False, True])
def test_workers_communicate_only_when_they_average(worlds, two_dtypes):
    for averaged, counts in worlds(2).run(collectives, two_dtypes):
        assert [step for step, done in enumerate(averaged) if done] == [5, 11, 17, 19]
        assert counts == [done * (1 + two_dtypes) for done in averaged]


def test_a_process_alone_never_communicates():
    assert collectives(Exchange(), True)[1] == [0] * 20


def of_the_page(exchange, block: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block, "docs/local.md", "exec"), {})
    return said.getvalue()


def test_the_code_of_the_page_trains_two_workers(worlds):
    """In one process: tests/end_to_end/test_docs_as_run.py."""
    page = (Path(__file__).parents[2] / "docs" / "local.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    said = "20 averagings in 200 steps; 100 of 100 right"
    assert f"This prints `{said}`" in page
    assert worlds(2).run(of_the_page, block) == [f"{said}\n"] * 2


def as_the_paper_has_it(exchange) -> tuple[list[bool], list[int], float]:
    """The calls of hmgxr128/QSR's README, without an exchange; then the largest difference between
    two workers' moments."""
    model = network()
    adamw = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = LocalOptimizer(
        optim=adamw, warmup_steps=4, total_steps=12, alpha=0.02, power=2.0, min_h=2, init_h=3,
        step_ctr=0, optim_fields_to_average=["exp_avg"],
    )  # fmt: skip
    averaged, lengths = [], []
    for step in range(12):
        backward(model, model, step, exchange.rank)
        averaged.append(optimizer.step())
        optimizer.zero_grad()
        if averaged[-1]:
            optimizer.adjust_h()
            lengths.append(optimizer.get_local_step())
    moments = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
    first, second = exchange.gather(torch.cat([weights(model), moments]))
    return averaged, lengths, (first - second).abs().max().item()


def test_without_an_exchange_all_processes_are_workers(worlds):
    for averaged, lengths, difference in worlds(2).run(as_the_paper_has_it):
        # Two rounds of the warm-up; then (0.02 / 0.01) ** 2 steps, and what is left.
        assert [step for step, done in enumerate(averaged) if done] == [2, 5, 9, 11]
        assert lengths == [3, 4, 2, 1] and difference == 0
