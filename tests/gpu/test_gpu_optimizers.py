"""Every optimizer on a GPU: no waits, flagged steps, resuming, the results of the CPU."""

import copy
import json

import pytest
import torch
from torch import nn

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.optim.factory import build_optimizer
from utils.optim.table import OPTIMIZERS
from utils.reporting.metrics import to_json

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)
VARIANTS = [(name, k) for name in OPTIMIZERS for k in (None, 3)]
each_optimizer = pytest.mark.parametrize(
    ("name", "lookahead_k"), VARIANTS, ids=[f"{n} {k or 'alone'}" for n, k in VARIANTS]
)


def make(name, lookahead_k, device=CUDA, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1, bias=False), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip
    model = model.to(device, dtype, memory_format=torch.channels_last)
    optimizer = build_optimizer(name, model, lr=0.01, weight_decay=0.1, lookahead_k=lookahead_k)
    return model, optimizer


def gradients(model, step, bad=False) -> None:
    """Gradients that depend on the step alone, not on the device."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        value = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        p.grad = torch.empty_like(p).copy_(value)
        if bad:
            p.grad.fill_(float("nan"))


def take(model, optimizer, steps, flagged=()) -> None:
    for step in steps:
        bad = step in flagged
        gradients(model, step, bad)
        optimizer.found_inf = torch.full((), float(bad), device=next(model.parameters()).device)
        optimizer.step()


def bits(model, optimizer, host_counts=True) -> list[torch.Tensor]:
    """Parameters and state; without `host_counts`, not the steps that the host counts."""
    saved = optimizer.state_dict()  # by then the host knows the last flag
    tensors = [p.detach().clone() for p in model.parameters()]
    for number in sorted(saved["state"]):
        state = saved["state"][number]
        kept = [k for k in sorted(state) if host_counts or not isinstance(state[k], int)]
        tensors += [torch.as_tensor(state[key]).clone() for key in kept]
    for group in saved["param_groups"]:
        counts = (group.get("step", 0), group.get("lookahead_step", 0))
        tensors += [torch.as_tensor(count).clone() for count in counts]
    return tensors


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@each_optimizer
def test_no_wait_after_the_first_step(name, lookahead_k):
    model, optimizer = make(name, lookahead_k)
    take(model, optimizer, range(1))
    ready = []
    for step in range(1, 13):
        gradients(model, step)
        flag = torch.full((), float(step == 3), device=CUDA)
        ready.append(([p.grad for p in model.parameters()], flag))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grads, flag in ready:
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.found_inf = flag
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_optimizer
def test_the_host_is_at_most_a_step_ahead(name, lookahead_k):
    """A step does not wait for its own flag, which is computed much later."""
    model, optimizer = make(name, lookahead_k)
    # CUDA loads a kernel when it is first launched, which may wait for the device; with lookahead
    # the third step launches others, and the sixth the same again.
    take(model, optimizer, range(5))
    gradients(model, 5)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    optimizer.found_inf = torch.zeros((), device=CUDA)
    optimizer.step()
    assert not torch.cuda.current_stream().query()  # the device is still asleep
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flagged", [(0,), (1, 2, 4), (0, 1, 3, 4, 5), (6,)])
def test_flagged_steps_leave_no_trace(name, flagged):
    """Except that NGD counts them in the timing of its updates, and Lookahead in that of its slow
    weights: their hosts never learn of them. The parameters to which NGD gives Adam's steps count
    on the device, and do not count them."""
    ngd, runs = name == "ngd", []
    for steps, bad in ((range(7), flagged), (sorted(set(range(7)) - {*flagged}), ())):
        model, optimizer = make(name, None)
        take(model, optimizer, steps, bad)
        states = optimizer.state_dict()["state"].values()
        counts = {state["step"] for state in states if isinstance(state.get("step"), int)}
        assert counts == ({len(steps)} if ngd else set())
        runs.append(bits(model, optimizer, host_counts=not ngd))
    assert same(*runs)


@each_optimizer
def test_parameters_of_a_flagged_step_are_right_at_once(name, lookahead_k):
    model, optimizer = make(name, lookahead_k)
    take(model, optimizer, range(2))
    before = [p.detach().clone() for p in model.parameters()]
    take(model, optimizer, [2], flagged=[2])
    assert same([p.detach() for p in model.parameters()], before)


@each_optimizer
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_is_uninterrupted_to_the_bit(name, lookahead_k, stop):
    whole, expected = make(name, lookahead_k)
    take(whole, expected, range(7), flagged=[3])
    model, optimizer = make(name, lookahead_k)
    take(model, optimizer, range(stop), flagged=[3])
    tensors, rest = optimizer_tensors(optimizer, {p: n for n, p in model.named_parameters()})
    tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    other, again = make(name, lookahead_k)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    names = {p: n for n, p in other.named_parameters()}
    restore_optimizer(again, names, tensors, json.loads(to_json(rest)))
    take(other, again, range(stop, 7), flagged=[3])
    assert same(bits(other, again), bits(whole, expected))


@each_optimizer
def test_steps_are_those_of_the_cpu(name, lookahead_k):
    runs = []
    for device in (CUDA, torch.device("cpu")):
        model, optimizer = make(name, lookahead_k, device, torch.float64)
        take(model, optimizer, range(5))
        runs.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-8)
