"""Apex's names of optimizers: by a stand-in for its kernels where that is installed, else by our
own; with all that is promised of an optimizer."""

import copy
import importlib
import sys

import pytest
import stand_in_for_apex
import torch
from flags_of_a_gpu import flags_as_on_a_gpu
from optimizer_tools import backward, bits, build, poison, same, small_model
from stand_in_for_apex import MADE

from resnet50_test import Settings
from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.exchange import Exchange
from utils.optim import apex as own_apex
from utils.optim import found_inf
from utils.optim.factory import is_capturable
from utils.optim.table import OPTIMIZERS
from utils.settings.config import parse

NAMES = ["fusedadam", "fusedlamb", "fusedsgd"]
each_name = pytest.mark.parametrize("name", NAMES)
PLAIN = {"fusedadam": "adamw", "fusedlamb": "lamb", "fusedsgd": "sgd"}


@pytest.fixture
def apex(monkeypatch):
    stand_in_for_apex.install(monkeypatch)
    yield
    own_apex.classes.cache_clear()


def made(name, apex: bool):
    """A model, and an optimizer of this name by the stand-in or by our own."""
    with pytest.MonkeyPatch.context() as patch:
        if not apex:
            patch.setattr(own_apex, "on_gpu", lambda parameter: False)
        model = small_model(True, torch.float32)
        optimizer = build(name, model)
    assert isinstance(optimizer, stand_in_for_apex._Plain) is apex
    return model, optimizer


def train(model, optimizer, steps) -> None:
    """With gradients that depend on the step alone: those of `backward` have some that are 0 but
    for rounding, of which Adam makes whole steps."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] / (1 + step)
        optimizer.step()


@each_name
def test_the_stand_in_takes_the_steps_of_our_own(apex, name):
    runs = [made(name, with_apex) for with_apex in (True, False)]
    for run in runs:
        train(*run, range(6))
    weights = [[p.detach() for p in model.parameters()] for model, _ in runs]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    model = small_model(True, torch.float32)
    optimizer = build(PLAIN[name], model, lr=0.01)
    train(model, optimizer, range(6))
    assert same([p.detach() for p in model.parameters()], weights[1])


@each_name
@pytest.mark.parametrize("late", [False, True], ids=["flag on the host", "flag on the device"])
def test_a_flagged_step_leaves_no_trace(apex, name, late):
    runs = []
    for flagged in ((0, 3), ()):
        model, optimizer = made(name, True)
        for step in range(5):
            backward(model, step)
            if step in (0, 3):
                if not flagged:
                    continue
                poison(model)
            optimizer.found_inf = torch.tensor(float(step in flagged))
            if late:
                with flags_as_on_a_gpu(found_inf):
                    optimizer.step()
            else:
                optimizer.step()
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in optimizer.state_dict()["param_groups"]
        ]
        runs.append((bits(model, optimizer), groups))
    assert same(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def resumed(name, before: bool, after: bool):
    """The weights after seven steps, of which four were taken before the run was resumed; each
    part with Apex or without."""
    model, optimizer = made(name, before)
    train(model, optimizer, range(4))
    names = {parameter: key for key, parameter in model.named_parameters()}
    tensors, rest = optimizer_tensors(optimizer, names)
    other, again = made(name, after)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    restore_optimizer(again, {p: key for key, p in other.named_parameters()}, tensors, rest)
    train(other, again, range(4, 7))
    return other, again


@each_name
@pytest.mark.parametrize("after", [True, False], ids=["with apex", "without"])
@pytest.mark.parametrize("before", [True, False], ids=["with apex before", "without before"])
def test_resumed_with_or_without_apex(apex, name, before, after):
    model, optimizer = made(name, after)
    train(model, optimizer, range(7))
    other, again = resumed(name, before, after)
    if before == after:
        assert same(bits(other, again), bits(model, optimizer))
    weights = [[p.detach() for p in each.parameters()] for each in (model, other)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@each_name
def test_a_line_says_what_computes_the_steps(apex, name):
    groups = [{"params": list(small_model(dtype=torch.float32).parameters())}]
    entry = OPTIMIZERS[name]
    assert f"--optimizer {name} is Apex's" in entry.remark(groups)
    assert not is_capturable(name, None)
    assert ("--clip is 1 unless given" in entry.remark(groups)) is (name == "fusedlamb")
    doubles = [{"params": list(small_model().parameters())}]
    assert "the same formula: Apex's kernels take" in entry.remark(doubles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_apex, "on_gpu", lambda parameter: False)
        assert "Apex's kernels are for GPUs" in entry.remark(groups)
        patch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "apex", None)
        assert "Apex is not installed" in entry.remark(groups) and is_capturable(name, None)


class Broken:
    """An import hook under which an extension fails as one for another PyTorch does."""

    def find_spec(self, name, path=None, target=None):
        if name == "amp_C":
            raise ImportError("libc10.so: undefined\nsymbol")
        return None


def test_why_apex_cannot_be_had(monkeypatch):
    assert own_apex.missing() == "Apex is not installed"
    parts = stand_in_for_apex.modules()
    monkeypatch.setitem(sys.modules, "apex", parts["apex"])
    assert own_apex.missing() == "Apex is installed without its CUDA extension"
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    importlib.invalidate_caches()
    assert own_apex.missing() == "Apex cannot be loaded (libc10.so: undefined symbol)"


class Divided(Exchange):
    def is_divided(self, parameter) -> bool:
        return True


def test_norms_of_divided_weights_are_not_apexs(apex):
    groups = [{"params": list(small_model(dtype=torch.float32).parameters())}]
    assert "need whole parameters" in OPTIMIZERS["fusedlamb"].remark(groups, Divided())
    assert "is Apex's" in OPTIMIZERS["fusedadam"].remark(groups, Divided())


def test_the_norm_of_the_gradient_is_limited_by_clip_alone(apex):
    made("fusedlamb", True)
    assert MADE[-1][1]["max_grad_norm"] == float("inf")

    def clip(*flags):
        return parse(Settings, [str(flag) for flag in flags], "")[0].clip

    assert clip("--optimizer", "fusedlamb") == 1.0 and clip("--optimizer", "lamb") is None
    assert clip("--optimizer", "fusedlamb", "--clip", 5) == 5.0
    for flag, none in (("--clip", "none"), ("--clip", 0), ("--max_grad_norm", "0.0")):
        assert clip("--optimizer", "fusedlamb", flag, none) == 0.0


def test_momentum_and_decays_reach_apex(apex):
    build("fusedsgd", small_model(dtype=torch.float32), momentum=0.7, nesterov=False)
    assert (MADE[-1][1]["momentum"], MADE[-1][1]["nesterov"]) == (0.7, False)
    build("fusedadam", small_model(dtype=torch.float32), betas="0.8,0.9", eps=0.1)
    assert (MADE[-1][1]["betas"], MADE[-1][1]["eps"]) == ((0.8, 0.9), 0.1)
