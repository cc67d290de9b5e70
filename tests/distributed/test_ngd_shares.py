"""NGD over several ranks equals NGD of one process, and each rank makes its part of the updates."""

import copy
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from flags_of_a_gpu import flags_as_on_a_gpu
from torch import nn

from utils.distributed.exchange import ProcessExchange
from utils.exchange import Exchange, Rows
from utils.optim.factory import build_optimizer
from utils.optim.ngd import batched_fisher
from utils.optim.ngd import optimizer as ngd
from utils.optim.ngd.optimizer import NGD
from utils.optim.ngd.shares import divide

# With rows that 2 and 4 do not divide, fewer rows than ranks, and one row: some ranks have none.
SHAPES = (
    *[(16, 8, 3, 3)] * 3, (8, 16, 1, 1), (10, 12), (10, 12), (41, 170), (5, 4, 3), (3, 9), (1, 9),
    (10,), (10,), (3,), (1,),
)  # fmt: skip
STEPS = 10
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}
SETTINGS = {
    "gradient": {"norm": "gradient", "weight_decay": 0.1},
    "fixed": {"norm": "fixed", "weight_decay": 0.1, "decoupled": True},
    "root": {
        "norm": "fixed",
        "weight_decay": 0.1,
        "decoupled": True,
        "power": 0.5,
        "alpha": 0.01,
        "momentum_first": True,
        "orthogonal": True,
        "axes": "patch",
    },
    "fixed_coupled": {"norm": "fixed", "weight_decay": 0.1, "axes": "channels"},
}


def whole_weights(dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def whole_gradients(step: int, dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    gradients = []
    for shape in SHAPES:
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        for axis, length in enumerate(shape):
            slope = torch.logspace(0, -1, length, dtype=torch.float64)
            gradient = gradient * slope.view(-1, *[1] * (len(shape) - axis - 1))
        gradients.append(gradient.to(dtype))
    return gradients


ALONE = (Exchange(), False)


class Training:
    """NGD over weights of SHAPES; `divided`: this rank has only its rows of each."""

    def __init__(self, exchange, divided=False, dtype=torch.float32, **settings):
        self.exchange, self.dtype, self.parameters = exchange, dtype, []
        for whole in whole_weights(dtype):
            rows = Rows(whole.shape, 0, len(whole))
            if divided:
                most = -(-len(whole) // exchange.size)
                start = min(exchange.rank * most, len(whole))
                rows = Rows(whole.shape, start, min(start + most, len(whole)))
            parameter = nn.Parameter(whole[rows.start : rows.end].clone())
            if divided:
                exchange.divide(parameter, rows)
            elif parameter.ndim == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
            self.parameters.append(parameter)
        settings = {"lr": 0.05, "update_period": 3} | settings
        self.optimizer = NGD(self.parameters, exchange=exchange, **settings)

    def give(self, step: int, resting=()) -> None:
        gradients = whole_gradients(step, self.dtype)
        for index, (parameter, whole) in enumerate(zip(self.parameters, gradients, strict=True)):
            part = self.exchange.part(parameter, whole)
            parameter.grad = None if index in resting else torch.empty_like(parameter).copy_(part)

    def take(self, steps) -> None:
        for step in steps:
            self.give(step)
            self.optimizer.step()

    @torch.no_grad()
    def weights(self) -> list[torch.Tensor]:
        """Copies of the whole weights."""
        return [self.exchange.whole(p, p).clone().contiguous() for p in self.parameters]

    def fisher(self) -> list[torch.Tensor]:
        """Copies of the Fisher matrices, which must be the same on all ranks, in a fixed order."""
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        return [
            state[key].clone()
            for state in states
            for key in sorted(state)
            if key.startswith(batched_fisher.FISHER)
        ]


def difference(ours: list, expected: list) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, expected, strict=True)
    )


def same_on_all(exchange, tensors: list) -> bool:
    """Whether the tensors of all ranks are equal to the bit."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return all(torch.equal(flat, other) for other in exchange.gather(flat))


# ---- equality -----------------------------------------------------------------------------------


def steps_of_both(exchange, divided, dtype, settings) -> None:
    ours, alone = (Training(e, d, dtype, **settings) for e, d in ((exchange, divided), ALONE))
    for training in (ours, alone):
        training.take(range(STEPS))
    assert same_on_all(exchange, ours.weights() + ours.fisher())
    for parameter in ours.parameters:
        assert ours.optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape
    assert difference(ours.weights(), alone.weights()) <= EXACT[dtype]
    assert difference(ours.fisher(), alone.fisher()) <= 10 * EXACT[dtype]


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize(
    ("size", "settings", "dtype"),
    [
        *[(2, settings, torch.float64) for settings in SETTINGS],
        (2, "gradient", torch.float32),
        *[
            pytest.param(2, settings, torch.float32, marks=pytest.mark.slow)
            for settings in SETTINGS
            if settings != "gradient"
        ],
        (1, "gradient", torch.float32),
        (1, "fixed", torch.float64),
        pytest.param(4, "gradient", torch.float32, marks=pytest.mark.slow),
        pytest.param(4, "fixed", torch.float64, marks=pytest.mark.slow),
    ],
)
def test_its_steps_are_those_of_one_process(worlds, size, settings, dtype, divided):
    worlds(size).run(steps_of_both, divided, dtype, SETTINGS[settings])


def with_rests(exchange, divided) -> None:
    """Some weights have no gradient at times, so that not all are updated in the same steps."""
    runs = [Training(e, d, torch.float64) for e, d in ((exchange, divided), ALONE)]
    for training in runs:
        for step in range(14):
            training.give(step, resting=(0, 4) if step % 5 == 0 else ())
            if step == 6:
                training.optimizer.param_groups[0]["update_period"] = 2
            if step == 9:
                training.optimizer.param_groups[0]["alpha"] = 2.0
            training.optimizer.step()
    ours, alone = runs
    assert difference(ours.weights(), alone.weights()) <= 1e-12
    assert difference(ours.fisher(), alone.fisher()) <= 1e-12
    assert same_on_all(exchange, ours.weights() + ours.fisher())


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_weights_may_rest_and_settings_may_change(worlds, divided):
    worlds(2).run(with_rests, divided)


def with_a_flagged_step(exchange, divided, on_host) -> None:
    ours, expected = Training(exchange, divided), Training(exchange, divided)
    for training in (ours, expected):
        training.take(range(3))
    before = ours.weights() + ours.fisher()
    ours.give(99)
    for parameter in ours.parameters:
        parameter.grad.fill_(float("nan"))
    ours.optimizer.found_inf = torch.ones(())
    if on_host:
        ours.optimizer.step()
    else:  # by selection
        with flags_as_on_a_gpu(ngd):
            ours.optimizer.step()
    for one, other in zip(ours.weights() + ours.fisher(), before, strict=True):
        assert torch.equal(one, other)
    ours.optimizer.found_inf = torch.zeros(())
    for training in (ours, expected):
        training.take(range(3, 8))
    for one, other in zip(ours.weights(), expected.weights(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_a_flagged_step_leaves_everything(worlds, on_host, divided):
    worlds(2).run(with_a_flagged_step, divided, on_host)


# ---- division of the work ------------------------------------------------------------------------


def counted_updates(exchange, divided) -> Counter:
    """Counts what this rank does in thirteen steps, eleven of which update Fisher matrices."""
    counts, root, scatter = Counter(), batched_fisher.inverse_root, batched_fisher.Scatter

    def counting_root(z):
        counts["updated"] += len(z)
        return root(z)

    def counting_scatter(product, *others):
        counts["noted"] += len(product)
        return scatter(product, *others)

    def counting(name):
        method = getattr(exchange, name)

        def call(*args):
            counts[name] += 1
            return method(*args)

        return call

    training = Training(exchange, divided)
    with (
        patch.object(batched_fisher, "inverse_root", counting_root),
        patch.object(batched_fisher, "Scatter", counting_scatter),
        patch.object(exchange, "gather", counting("gather"), create=True),
        patch.object(exchange, "whole", counting("whole"), create=True),
    ):
        training.take(range(13))
    return counts


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("size", (2, 4))
def test_each_rank_makes_its_part_and_one_collective_distributes_it(worlds, size, divided):
    alone = counted_updates(Exchange(), False)
    assert alone["updated"] == alone["noted"] and "gather" not in alone
    ranks = worlds(size).run(counted_updates, divided)
    for key in ("updated", "noted"):
        assert sum(rank[key] for rank in ranks) == alone[key]
        assert max(rank[key] for rank in ranks) < alone[key]
    # Parameters of a shape with Fisher matrices are gathered together.
    shapes = {shape for shape in SHAPES if sum(length > 1 for length in shape) > 1}
    for rank in ranks:
        assert rank["gather"] == 11
        assert rank["whole"] == (13 * len(shapes) if divided else 0)


@pytest.mark.parametrize("size", (1, 2, 3, 4, 8))
def test_shares_are_balanced_and_leave_nothing_out(size):
    costs, counts = [9.0, 5.0, 3.0, 1.0, 0.1, 0.01], [20, 31, 12, 8, 50, 3]
    parts = divide(costs, counts, size)
    assert parts == divide(costs, counts, size)
    loads = [0.0] * size
    for cost, count, of_ranks in zip(costs, counts, parts, strict=True):
        assert [i for part in of_ranks for i in range(count)[part]] == list(range(count))
        for rank, part in enumerate(of_ranks):
            loads[rank] += cost * (part.stop - part.start)
    assert max(loads) < 1.05 * sum(loads) / size


def test_one_large_axis_is_divided_and_ranks_may_have_nothing_to_do():
    assert divide([2.0], [8], 4) == [[slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]]
    (parts,) = divide([2.0], [2], 4)
    assert [part.stop - part.start for part in parts] == [1, 1, 0, 0]


# ---- saving -------------------------------------------------------------------------------------


def state_of(training) -> dict:
    """The state as without sharding: momentum_buffer has the rows of all ranks."""
    saved = copy.deepcopy(training.optimizer.state_dict())
    for index, parameter in enumerate(training.parameters):
        own = saved["state"][index]
        own["momentum_buffer"] = training.exchange.whole(parameter, own["momentum_buffer"])
    return saved


def load(training, weights: list, saved: dict) -> None:
    saved = copy.deepcopy(saved)
    for index, parameter in enumerate(training.parameters):
        own, part = saved["state"][index], training.exchange.part
        own["momentum_buffer"] = part(parameter, own["momentum_buffer"]).clone()
        parameter.data.copy_(part(parameter, weights[index]))
    training.optimizer.load_state_dict(saved)


def twelve_steps(exchange, divided):
    training = Training(exchange, divided, torch.float64)
    training.take(range(12))
    return training.weights(), state_of(training)


def eight_more(exchange, divided, weights, saved):
    training = Training(exchange, divided, torch.float64)
    load(training, weights, saved)
    training.take(range(12, 20))
    return training.weights()


@pytest.mark.parametrize("to", (1, 4))
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_a_state_saved_by_two_ranks_can_be_loaded_by_any_number(worlds, divided, to):
    weights, saved = worlds(2).run(twelve_steps, divided)[0]
    alone = Training(*ALONE, torch.float64)
    alone.take(range(20))
    for ours in worlds(to).run(eight_more, divided and to > 1, weights, saved):
        assert difference(ours, alone.weights()) <= 1e-12


def resumed(exchange, divided) -> None:
    for dtype in EXACT:
        ours, again = Training(exchange, divided, dtype), Training(exchange, divided, dtype)
        ours.take(range(12))
        load(again, ours.weights(), state_of(ours))
        for training in (ours, again):
            training.take(range(12, 20))
        both = (ours.weights() + ours.fisher(), again.weights() + again.fisher())
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(worlds, divided):
    worlds(2).run(resumed, divided)


# ---- use ----------------------------------------------------------------------------------------


def built(exchange: ProcessExchange) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 6))
    models = model, copy.deepcopy(model)
    inputs, settings = torch.randn(8, 3, 4, 4), {"lr": 0.01, "weight_decay": 0.1, "lookahead_k": 3}
    for each, others in zip(models, (exchange, None), strict=True):
        optimizer = build_optimizer("ngd", each, exchange=others, **settings)
        for _ in range(8):
            optimizer.zero_grad()
            each(inputs).square().mean().backward()
            optimizer.step()
    assert (
        difference(*(list(map(torch.Tensor.detach, each.parameters())) for each in models)) < 1e-6
    )
    assert same_on_all(exchange, [p.detach() for p in models[0].parameters()])


def test_the_factory_hands_over_the_exchange(worlds):
    worlds(2).run(built)
    build_optimizer("sgd", nn.Linear(3, 2), lr=0.1, weight_decay=0.0, exchange=Exchange())
