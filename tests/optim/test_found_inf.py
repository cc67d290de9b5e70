"""Flagged steps leave no trace, also where the host learns of the flag late, as on a GPU."""

import copy
import pickle

import pytest
import timm.optim
import torch
from flags_of_a_gpu import flags_as_on_a_gpu
from optimizer_tools import backward, bits, build, poison, same, small_model

from utils.optim import found_inf
from utils.optim.factory import parameter_groups
from utils.optim.found_inf import HonoursFoundInf, LateFlag, honouring

OURS = ["lamb", "muon", "madgrad", "fusednovograd"]
OF_PYTORCH = {"PyTorch's SGD": torch.optim.SGD, "PyTorch's NAdam": torch.optim.NAdam}
CASES = ["a library's", *OURS]


class Library(HonoursFoundInf, timm.optim.MADGRAD):
    """An optimizer of a library, which counts its steps on the host."""


def make(name: str, model):
    if name == "a library's":
        return Library(parameter_groups(model, 0.1), lr=0.01)
    if name in OF_PYTORCH:
        return honouring(OF_PYTORCH[name](parameter_groups(model, 0.1), lr=0.01))
    return build(name, model)


def late_step(optimizer, flag) -> None:
    """A step whose flag only the device knows. (Not in NGD and Lookahead, which count it.)"""
    optimizer.found_inf = flag
    with flags_as_on_a_gpu(found_inf):
        optimizer.step()
    optimizer.found_inf = None


@pytest.mark.parametrize("name", [*CASES, *OF_PYTORCH])
@pytest.mark.parametrize("flags", ["1000000", "0110100", "1101111", "0000001", "1111110"])
def test_flagged_steps_leave_no_trace(name, flags):
    runs = []
    for with_flagged in (True, False):
        model = small_model(True, torch.float32)
        optimizer = make(name, model)
        for step, flag in enumerate(map(int, flags)):
            if flag and not with_flagged:
                continue
            backward(model, step)
            if flag:
                poison(model)
            for group in optimizer.param_groups:  # before the step, as the schedule does
                group["lr"] = 0.01 / (1 + step)
            if with_flagged:
                late_step(optimizer, torch.tensor(float(flag)))
            else:
                optimizer.step()
        saved = optimizer.state_dict()["param_groups"]  # the last flag is known from here on
        counts = [{k: v for k, v in g.items() if k not in ("lr", "params")} for g in saved]
        runs.append((bits(model, optimizer), counts))
    assert same(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def test_weights_are_right_at_once_and_counts_when_they_are_needed():
    model = small_model(True, torch.float32)
    optimizer = make("a library's", model)
    backward(model, 0)
    optimizer.step()
    before = bits(model, optimizer)
    poison(model)
    late_step(optimizer, torch.ones(()))
    weight = model[0].weight
    assert torch.equal(weight, before[0]) and optimizer.state[weight]["step"] == 2
    optimizer.state_dict()  # must have the right counts, so the flag is read
    assert optimizer.state[weight]["step"] == 1 and same(bits(model, optimizer), before)


def test_a_loaded_state_is_not_undone():
    model = small_model(True, torch.float32)
    optimizer = make("a library's", model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    saved = optimizer.state_dict()
    late_step(optimizer, torch.ones(()))
    optimizer.load_state_dict(saved)
    loaded = bits(model, optimizer)
    optimizer.state_dict()  # would undo the flagged step
    assert same(bits(model, optimizer), loaded)


def test_a_late_flag_has_its_value_at_the_time_of_its_step():
    late, undone = LateFlag(), []
    flag = torch.ones(())
    late.expect(flag, lambda: undone.append("first"))
    flag.zero_()
    late.settle()
    late.settle()
    late.expect(flag, lambda: undone.append("second"))
    late.settle()
    assert undone == ["first"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_takes_the_same_steps(name, way):
    model = small_model(True, torch.float32)
    optimizer = make(name, model)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    both = {"model": model, "optimizer": optimizer}
    both = pickle.loads(pickle.dumps(both)) if way == "pickle" else copy.deepcopy(both)
    assert type(both["optimizer"]) is type(optimizer)
    runs = []
    for each, own in ((model, optimizer), (both["model"], both["optimizer"])):
        backward(each, 3)
        poison(each)
        late_step(own, torch.ones(()))
        backward(each, 4)
        own.step()
        runs.append(bits(each, own))
    assert same(*runs)


def test_a_copy_knows_a_late_flag():
    model = small_model(True, torch.float32)
    optimizer = make("a library's", model)
    backward(model, 0)
    optimizer.step()
    late_step(optimizer, torch.ones(()))
    again = copy.deepcopy(optimizer)
    assert {state["step"] for state in again.state.values()} == {1}


def test_a_flagged_step_on_the_cpu_does_not_call_the_closure():
    model = small_model(True, torch.float32)
    optimizer = make("a library's", model)
    backward(model, 0)
    optimizer.found_inf = torch.ones(())
    assert optimizer.step(lambda: pytest.fail("was called")) is None
