"""Natural gradient on a GPU: as on the CPU, without waits, in the documented memory."""

import pytest
import torch
from torch import nn

from utils.optim.ngd.optimizer import NGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROOT = {"norm": "fixed", "power": 0.5, "momentum_first": True, "alpha": 0.01}
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SHAPES = (
    (64, 32, 3, 3), (64, 32, 3, 3), (64, 64, 1, 1), (10, 64), (200, 17), (8, 4, 5), (2, 2),
    (64,), (1, 7, 1), (),
)  # fmt: skip


def weights(device, channels_last=False, dtype=torch.float32, shapes=SHAPES):
    generator, made = torch.Generator().manual_seed(0), []
    for shape in shapes:
        value = torch.randn(shape, generator=generator).to(device, dtype)
        if channels_last and len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        made.append(nn.Parameter(value))
    return made


def gradients(parameters, steps: int) -> list[list[torch.Tensor]]:
    """Gradients for each step: larger along some channels, the same on all devices."""
    made = []
    for step in range(steps):
        generator, of_step = torch.Generator().manual_seed(step + 1), []
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            for axis, length in enumerate(parameter.shape):
                size = [1] * parameter.ndim
                size[axis] = length
                gradient = gradient * torch.logspace(0, -1, length).view(size)
            like = torch.empty_like(parameter)  # in the same memory format, too
            of_step.append(like.copy_(gradient))
        made.append(of_step)
    return made


def run(optimizer, parameters, steps: list[list[torch.Tensor]]) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1, "update_period": 1, "axes": "channels"},
        {"weight_decay": 0.1, "decoupled": True, "nesterov": False, "rank": 3},
        {"norm": "fixed", "weight_decay": 0.1, "decoupled": True},
        {"weight_decay": 0.1, "decoupled": True, "axes": "patch", **ROOT},
        {"weight_decay": 0.1, "decoupled": True, "adam": True},
    ],
    ids=["defaults", "channels", "decoupled", "fixed", "root", "adam"],
)
def test_twenty_steps_are_those_of_the_cpu(channels_last, settings):
    results = []
    for device in (CUDA, CPU):
        parameters = weights(device, channels_last)
        run(NGD(parameters, lr=0.05, **settings), parameters, gradients(parameters, 20))
        results.append([parameter.detach().cpu() for parameter in parameters])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "form",
    [{}, {"norm": "fixed"}, ROOT, {"adam": True}],
    ids=["gradient", "fixed", "root", "adam"],
)
@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
def test_no_step_waits(dtype, decoupled, form):
    """Not even with updates, flags, changed settings, or right after a state was loaded."""
    parameters = weights(CUDA, channels_last=True, dtype=dtype)
    settings = {"decoupled": decoupled, "products": "fast"} | form
    optimizer = NGD(parameters, weight_decay=0.1, **settings)
    steps = gradients(parameters, 16)
    flags = [torch.tensor(float(step == 7), device=CUDA) for step in range(16)]
    scale = torch.full((), 2.0, device=CUDA)
    run(optimizer, parameters, steps[:2])  # sets up kernels and memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(2, 16):
            optimizer.found_inf, optimizer.grad_scale = flags[index], scale
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
            optimizer.param_groups[0]["alpha"] = 4.0 if index < 12 else 2.0
            run(optimizer, parameters, steps[index : index + 1])
        again = NGD(parameters)
        again.load_state_dict(optimizer.state_dict())
        run(again, parameters, steps[:2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.isfinite().all() for parameter in parameters)


@pytest.mark.parametrize("form", [{}, ROOT, {"adam": True}], ids=["paper", "root", "adam"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
@pytest.mark.parametrize("at", [1, 8, 11])
def test_a_flagged_step_leaves_everything_to_the_bit(decoupled, at, form):
    parameters = weights(CUDA, channels_last=True)
    optimizer = NGD(parameters, weight_decay=0.1, decoupled=decoupled, **form)
    run(optimizer, parameters, gradients(parameters, at))
    before = [parameter.detach().clone() for parameter in parameters]
    state = [
        {key: value.clone() for key, value in optimizer.state[p].items() if torch.is_tensor(value)}
        for p in parameters
    ]
    optimizer.found_inf = torch.ones((), device=CUDA)
    run(optimizer, parameters, [[torch.full_like(p, float("nan")) for p in parameters]])
    for parameter, value, own in zip(parameters, before, state, strict=True):
        assert torch.equal(parameter, value)
        for key, expected in own.items():
            assert torch.equal(optimizer.state[parameter][key], expected), key


def test_the_grad_scaler_of_a_users_own_loop():
    """Its flag and scale are on the device; the steps are those without it."""
    plain, scaled = weights(CUDA), weights(CUDA)
    steps = gradients(plain, 12)
    run(NGD(plain, lr=0.05), plain, steps)
    optimizer, scaler = NGD(scaled, lr=0.05), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in steps:
        scaler.scale(torch.ones((), device=CUDA))  # as scaler.scale(loss).backward() does
        for parameter, gradient in zip(scaled, step, strict=True):
            parameter.grad = gradient * 1024.0
        scaler.step(optimizer)
        scaler.update()
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_memory_is_what_is_documented():
    """Momentum; R, Lambda and rho; multipliers; and two workspaces of one batch."""
    shapes = [(256, 256, 3, 3)] * 4 + [(512, 256)] * 2
    parameters = weights(CUDA, channels_last=True, shapes=shapes)
    steps = gradients(parameters, 3)
    run(NGD(parameters), parameters, steps[:1])  # what libraries keep for themselves
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = NGD(parameters)
    run(optimizer, parameters, steps)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before

    size = sum(parameter.numel() for parameter in parameters)  # in floats
    workspaces = 2 * 4 * parameters[0].numel()  # the four convolutions are the largest batch
    fisher = sum(
        value.numel()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key.startswith(("basis", "spectrum", "rest"))
    )
    multiplied = fisher  # at most: (r, D), or (D, D) where 2 r >= D, which is along short axes
    stated = 4 * (size + fisher + multiplied + workspaces)
    assert kept <= 1.05 * stated + 2**20, (kept, stated)
    # In a step besides: X R' of a batch, a third of its size here, and some matrices for updates.
    assert peak <= stated + 4 * (workspaces / 2 + 8 * fisher) + 2**20, (peak, stated)
