"""Muon against its formula and timm's, its launches on a GPU, and checkpoints of when it was
timm's."""

import copy
import functools

import pytest
import timm.optim.muon
import torch
from launches import launches_of_a_step
from optimizer_tools import backward, build
from torch import nn

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.optim import muon_steps
from utils.optim.factory import parameter_groups
from utils.optim.muon import make
from utils.optim.muon_steps import COEFFICIENTS, Muon, is_matrix

LR, DECAY, MOMENTUM = 0.05, 0.1, 0.95


def network(channels_last: bool = False, dtype=torch.float64) -> nn.Module:
    """With matrices of one shape, of that shape transposed, of others, and none."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 1, bias=False),
        nn.Conv2d(12, 12, 3, groups=12), nn.Conv2d(12, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12),
        nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 4),
    )  # fmt: skip
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(dtype=dtype, memory_format=memory_format)


def timms(model: nn.Module, decay_all: bool = False):
    """As this project used it."""
    group, *others = parameter_groups(model, DECAY, decay_all)
    head = [p for p in group["params"] if p.ndim == 2][-1]
    hidden = [p for p in group["params"] if p is not head]
    own = [group | {"params": hidden}, group | {"params": [head], "use_fallback": True}, *others]
    return timm.optim.Muon(own, lr=LR, momentum=MOMENTUM, nesterov=True)


def ours(model: nn.Module, decay_all: bool = False):
    return build("muon", model, lr=LR, decay_all=decay_all, momentum=MOMENTUM)


@pytest.fixture
def exact(monkeypatch):
    """timm's iterations in float64, too."""
    plain = timm.optim.muon.zeropower_via_newtonschulz
    monkeypatch.setattr(
        timm.optim.muon,
        "zeropower_via_newtonschulz",
        functools.partial(plain, dtype=torch.float64),
    )


def both_step(one, other, optimizers, first: int, last: int) -> None:
    """With the same gradients."""
    for step in range(first, last):
        backward(other, step)
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            p.grad = q.grad.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR / (1 + step)
            optimizer.step()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_it_equals_timms(exact, decay_all, channels_last):
    model = network(channels_last)
    other = copy.deepcopy(model)
    both_step(model, other, (ours(model, decay_all), timms(other, decay_all)), 0, 50)
    assert_equal(model, other)


def test_the_classifier_takes_adams_steps_wherever_it_is():
    """Not the last matrix: a distilled transformer has two heads, and a model of one's own may
    name its head first."""
    head, body, last = (nn.Parameter(torch.ones(16, 16)) for _ in range(3))
    group = {"params": [head, body, last], "weight_decay": 0.0}
    for heads, expected in (([head], head), ([], last)):
        groups = make([group], lr=LR, momentum=MOMENTUM, heads=heads).param_groups
        (of_adam,) = [p for each in groups if each.get("use_fallback") for p in each["params"]]
        assert of_adam is expected


class Formula:
    """Muon of one matrix, in plain float64."""

    def __init__(self, normalize: bool):
        self.b, self.normalize = 0.0, normalize

    def step(self, p, g, lr):
        self.b = MOMENTUM * self.b + (1 - MOMENTUM) * g
        u = (1 - MOMENTUM) * g + MOMENTUM * self.b
        x = u.reshape(len(u), -1) / u.norm()
        for a, b, c in COEFFICIENTS:
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        kept = p * (len(p) ** 0.5 / p.norm() if self.normalize else 1 - lr * DECAY)
        return kept - lr * 0.2 * max(x.shape) ** 0.5 * x.view(p.shape)


SHAPES = [(8, 3, 3, 3), (12, 8), (8, 12), (12, 8), (20, 27), (27, 20, 1, 1), (4, 512)]


def matrices(dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize(
    ("piece", "normalize"), [(1 << 25, False), (500, False), (1, False), (500, True)]
)
def test_it_equals_its_formula(monkeypatch, piece, normalize):
    """However many matrices are stepped at once."""
    monkeypatch.setattr(muon_steps, "PIECE", piece)
    parameters = matrices(torch.float64)
    plain = [p.detach().clone() for p in parameters]
    formulas = [Formula(normalize) for _ in parameters]
    settings = {"momentum": MOMENTUM, "weight_decay": DECAY, "normalize": normalize}
    optimizer = Muon([{"params": parameters}], lr=LR, **settings)
    for step in range(20):
        torch.manual_seed(step)
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            plain[index] = formulas[index].step(plain[index], parameter.grad, LR)
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in parameters], plain, rtol=1e-9, atol=1e-10)


def test_float32_is_as_exact_as_timms():
    """Both make the iterations in bfloat16, which is exact to 1/256."""
    weights = []
    for kind in ("timm", "ours", "exact"):
        parameters = matrices(torch.float64 if kind == "exact" else torch.float32)
        made = timm.optim.Muon if kind == "timm" else Muon
        options = {"nesterov": True} if kind == "timm" else {}
        optimizer = made(
            [{"params": parameters}], lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **options
        )
        for step in range(20):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
            optimizer.step()
        weights.append([parameter.detach().double() for parameter in parameters])
    for start, theirs, own, exact in zip(matrices(torch.float64), *weights, strict=True):
        error = (own - exact).norm()
        assert error < 1.5 * (theirs - exact).norm() and error < 0.02 * (exact - start).norm()


@pytest.mark.parametrize(
    ("shape", "whether"),
    [
        ((4, 512), True), ((3, 9), False), ((4, 513), False), ((8, 1, 3, 3), False),
        ((1, 196, 768), False), ((96, 3, 4, 4), True), ((64,), False), ((), False),
    ],
)  # fmt: skip
def test_what_is_a_matrix(shape, whether):
    assert is_matrix(torch.Size(shape)) is whether
    assert timm.optim.muon._is_suitable_for_muon(torch.empty(shape)) is whether


def test_parameters_that_join_later_and_views():
    """Of Adam's count of steps; parameters whose rows are no blocks of memory."""
    torch.manual_seed(0)
    wide, tall = torch.randn(2, 6, 16, dtype=torch.float64)
    starts = [wide[:, ::2], tall.t(), torch.ones(3, dtype=torch.float64), torch.ones(3)]
    parameters = [nn.Parameter(start) for start in starts]
    copies = [nn.Parameter(start.clone(memory_format=torch.contiguous_format)) for start in starts]
    runs = [Muon([{"params": each}], lr=LR) for each in (parameters, copies)]
    for step in range(4):
        for one, other in zip(parameters, copies, strict=True):
            one.grad = torch.randn(one.shape, dtype=one.dtype) if step > 1 or one.ndim > 1 else None
            other.grad = one.grad
        for optimizer in runs:
            optimizer.step()
    assert runs[0].state[parameters[2]]["step"] == 2
    for one, other in zip(parameters, copies, strict=True):
        tolerance = 1e-10 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=tolerance)


def test_a_checkpoint_of_timms_goes_on(exact):
    """Runs that were started before Muon was ours."""
    other = network()
    optimizer = timms(other)
    both_step(copy.deepcopy(other), other, (optimizer,), 0, 5)
    names = {parameter: name for name, parameter in other.named_parameters()}
    tensors, rest = optimizer_tensors(optimizer, names)
    model = copy.deepcopy(other)
    names = {parameter: name for name, parameter in model.named_parameters()}
    resumed = ours(model)
    restore_optimizer(resumed, names, tensors, rest)
    both_step(model, other, (optimizer, resumed), 5, 10)
    assert_equal(model, other)
    new, _ = optimizer_tensors(resumed, names)
    assert {*new} == {*tensors}


@pytest.mark.slow
@pytest.mark.parametrize("decay_all", [True, False])
def test_launches_of_a_step(decay_all):
    """timm's launches 3,738."""
    launches = launches_of_a_step("muon", decay_all=decay_all)
    assert launches.total() <= 310, launches
