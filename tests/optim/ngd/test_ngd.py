"""Natural gradient against its equations in plain NumPy, and with difficult gradients."""

import functools

import numpy as np
import pytest
import torch
from ngd_reference import trajectory
from ngd_tools import (
    DTYPES,
    SHAPES,
    SMALL,
    WITHOUT_LONG_AXIS,
    assert_near,
    each_dtype,
    random_gradients,
    random_start,
    run,
)

# ---- trajectories against the reference ---------------------------------------------------------

# Each value of a setting meets each value of every other one in at least one of these.
SETTINGS = {
    "defaults": {},
    "coupled": {"weight_decay": 0.1, "update_period": 1, "axes": "channels", "nesterov": False},
    "decoupled": {"weight_decay": 0.1, "decoupled": True, "nesterov": False},
    "decoupled_channels": {
        "weight_decay": 0.1, "decoupled": True, "axes": "channels", "update_period": 1,
    },
    "coupled_nesterov": {"weight_decay": 0.1, "axes": "all", "update_period": 1},
    "dampened": {"nesterov": False, "dampening": 0.3, "axes": "channels", "alpha": 1.0},
    "no_momentum": {"nesterov": False, "momentum": 0.0, "rank": 3, "update_period": 1, "eta": 0.3},
    "fixed": {"norm": "fixed", "weight_decay": 0.1, "decoupled": True, "eta": 0.3},
    "fixed_coupled": {
        "norm": "fixed", "weight_decay": 0.1, "axes": "channels", "nesterov": False, "alpha": 1.0,
    },
    "root": {"power": 0.5, "alpha": 0.01, "update_period": 1},
    "kernel": {"axes": "kernel", "update_period": 1},
    "patch": {"axes": "patch", "weight_decay": 0.1, "nesterov": False},
    "root_fixed": {
        "norm": "fixed", "power": 0.5, "alpha": 0.01, "weight_decay": 0.1, "decoupled": True,
        "momentum_first": True, "axes": "patch",
    },
    "first": {"momentum_first": True, "weight_decay": 0.1, "rank": 3},
    "first_plain": {
        "momentum_first": True, "nesterov": False, "dampening": 0.3, "power": 0.5, "norm": "fixed",
        "weight_decay": 0.1,
    },
    "orthogonal": {
        "norm": "fixed", "power": 0.5, "alpha": 0.01, "momentum_first": True, "orthogonal": True,
        "axes": "patch",
    },
    "orthogonal_matrices": {"norm": "fixed", "orthogonal": True, "axes": "all"},
    "only_newest": {"eta": 1.0, "alpha": 0.5, "rank": 1, "update_period": 7},
}  # fmt: skip


WIDE = {"wide": (96, 48), "wide_conv": (40, 24, 3, 3)}  # axes that are not short


# Each form of the step once: these take more steps, in float32, too. The others take float32 in
# `make slow`.
EACH_FORM = ("defaults", "decoupled", "root_fixed", "first_plain")


@functools.cache
def case(settings: str):
    """(start, gradients, trajectory) with the learning rate of the tests"""
    shapes = SHAPES if settings in ("defaults", "coupled") else WITHOUT_LONG_AXIS
    if settings.startswith("orthogonal"):
        shapes = shapes | {"tall": (9, 4), "long": (4, 600)}  # the last one is no matrix to Muon
    steps = 50 if settings in EACH_FORM else 25  # F is updated in the first ten, then every few
    start, gradients = random_start(shapes), random_gradients(shapes, steps)
    return start, gradients, trajectory(start, gradients, lr=0.05, **SETTINGS[settings])


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        *[(settings, torch.float64) for settings in SETTINGS],
        *[
            pytest.param(
                settings, torch.float32, marks=[] if settings in EACH_FORM else pytest.mark.slow
            )
            for settings in SETTINGS
            if not settings.startswith("orthogonal")  # whose iterations may be in bfloat16
        ],
    ],
    ids=str,
)
def test_many_steps_are_those_of_the_equations(settings, dtype):
    start, gradients, expected = case(settings)
    ours, _ = run(start, gradients, dtype, lr=0.05, **SETTINGS[settings])
    assert_near(ours, expected, DTYPES[dtype])


@pytest.mark.parametrize("norm", ["gradient", "fixed"])
def test_fast_products_give_the_same_up_to_their_rounding(norm):
    """To the bit on machines without units that multiply short floats."""
    start, gradients = random_start(SMALL | WIDE), random_gradients(SMALL | WIDE, 20)
    settings = {"lr": 0.05, "weight_decay": 0.1, "norm": norm}
    expected, _ = run(start, gradients, torch.float32, **settings)
    ours, _ = run(start, gradients, torch.float32, products="fast", **settings)
    for name, value in expected[-1].items():
        moved = np.linalg.norm(value - start[name])
        assert np.linalg.norm(ours[-1][name] - value) <= 0.02 * moved, name


def test_the_process_wide_precision_of_products_is_kept_and_has_no_effect():
    start, gradients = random_start(WIDE), random_gradients(WIDE, 12)
    expected, _ = run(start, gradients, torch.float32)
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "bf16"
        ours, _ = run(start, gradients, torch.float32)
        assert backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before
    assert_near(ours, expected, 0)


@each_dtype
def test_gradients_that_jump_in_scale(dtype):
    """A thousand times larger from step 30 on, and back from step 60 on."""
    start, gradients = random_start(SMALL), random_gradients(SMALL, 90)
    for index in range(30, 60):
        gradients[index] = {name: 1e3 * value for name, value in gradients[index].items()}
    settings = {"lr": 0.05, "weight_decay": 0.01, "update_period": 2}
    ours, _ = run(start, gradients, dtype, **settings)
    assert_near(ours, trajectory(start, gradients, **settings), DTYPES[dtype])


def test_zero_gradients_update_f_like_any_others():
    """S = 0, so F shrinks by 1 - eta; where F is still 0, it stays 0."""
    start, gradients = random_start(SMALL), random_gradients(SMALL, 12)
    for index in (0, 1, 5, 6, 7):
        gradients[index] = {name: 0 * value for name, value in gradients[index].items()}
    ours, _ = run(start, gradients, update_period=1)
    assert_near(ours, trajectory(start, gradients, update_period=1), 1e-9)


def test_a_weight_without_gradient_is_not_stepped():
    """So weights of one shape have different step counts, and each is right by itself."""
    start, gradients = random_start(SHAPES), random_gradients(SHAPES, 30)
    for index, step in enumerate(gradients):
        if index % 3 == 0:
            del step["conv"], step["bias"]
        if index < 10:
            del step["linear_again"]
        if index % 7 == 2:
            step.clear()
    ours, _ = run(start, gradients, weight_decay=0.01)
    assert_near(ours, trajectory(start, gradients, weight_decay=0.01), 1e-9)


@pytest.mark.parametrize("rank", [1, 2, 3, 80])
def test_it_equals_the_equations_at_any_rank(rank):
    start, gradients = random_start(SMALL), random_gradients(SMALL, 20)
    ours, optimizer = run(start, gradients, rank=rank)
    assert_near(ours, trajectory(start, gradients, rank=rank), 1e-9)
    for parameter, state in optimizer.state.items():
        for axis, length in enumerate(parameter.shape):
            if f"basis_{axis}" in state:
                assert state[f"basis_{axis}"].shape == (min(rank, length - 1), length)


# ---- difficult gradients ------------------------------------------------------------------------

HARD = {"conv": (6, 4, 3, 3), "linear": (10, 12), "pair": (2, 2), "bias": (5,), "one": (1, 1)}


def is_finite(after: list[dict], optimizer) -> bool:
    state = [v for of in optimizer.state.values() for v in of.values() if torch.is_tensor(v)]
    return all(np.isfinite(value).all() for step in after for value in step.values()) and all(
        tensor.isfinite().all() for tensor in state
    )


@each_dtype
@pytest.mark.parametrize("norm", ["gradient", "fixed"])
@pytest.mark.parametrize("name", ["zero", "zero_then_not", "not_then_zero", "one_row", "one_entry"])
def test_degenerate_gradients_give_finite_steps(name, norm, dtype):
    start, gradients = random_start(HARD), random_gradients(HARD, 25)
    for index, step in enumerate(gradients):
        for key, value in step.items():
            if name == "zero" or (name == "zero_then_not" and index < 5):
                step[key] = 0 * value
            if name == "not_then_zero" and index >= 5:
                step[key] = 0 * value
            if name in ("one_row", "one_entry") and value.ndim > 1:
                step[key] = np.zeros_like(value)
                chosen = (1 % len(value),) + (
                    (0,) * (value.ndim - 1) if name == "one_entry" else ()
                )
                step[key][chosen] = value[chosen]
    ours, optimizer = run(start, gradients, dtype, update_period=1, norm=norm)
    assert is_finite(ours, optimizer)
    moved = [np.abs(ours[-1][key] - start[key]).max() for key in start]
    assert max(moved) < 1e-6 if name == "zero" else min(moved) > 1e-3


def narrow_gradients(kind: str, shape: tuple, steps: int) -> list[dict]:
    """Gradients "w" that leave most of the space empty, or nearly so."""
    rng, gradients = np.random.default_rng(5), []
    left, right = rng.standard_normal(shape[0]), rng.standard_normal(shape[1])
    for _ in range(steps):
        noise = rng.standard_normal(shape)
        if kind == "other_direction_each_step":
            left, right = rng.standard_normal(shape[0]), rng.standard_normal(shape[1])
        gradient = np.outer(left, right)
        if kind == "one_direction_and_noise":
            gradient = rng.standard_normal() * gradient + 0.01 * noise
        if kind == "dead_channels":
            gradient = np.zeros(shape)
            gradient[:3, :3] = noise[:3, :3]
        gradients.append({"w": gradient})
    return gradients


@each_dtype
@pytest.mark.parametrize(
    "kind",
    ["one_direction", "one_direction_and_noise", "other_direction_each_step", "dead_channels"],
)
def test_the_basis_is_kept_by_gradients_of_low_rank(kind, dtype):
    """A lost row of R would be lost for good: Y = R T has no component along it."""
    shape = (10, 12)
    start, gradients = random_start({"w": shape}), narrow_gradients(kind, shape, 130)
    settings = {"momentum": 0.0, "nesterov": False, "lr": 1.0, "update_period": 1}
    ours, optimizer = run(start, gradients, dtype, **settings)
    assert is_finite(ours, optimizer)
    last = ours[-2]["w"] - ours[-1]["w"]
    assert np.linalg.norm(last) == pytest.approx(np.linalg.norm(gradients[-1]["w"]), rel=1e-3)
    (state,) = optimizer.state.values()
    for axis in (0, 1):
        basis = state[f"basis_{axis}"].double()
        error = (basis @ basis.T - torch.eye(len(basis), dtype=basis.dtype)).abs().max()
        assert error < 1e-4, error.item()


@each_dtype
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_gradients_at_the_end_of_the_range(dtype, scale):
    """Squares of 1e-20 and 1e20 are 0 and infinite in float32: then the gradient is left as is."""
    start, gradients = random_start(HARD), random_gradients(HARD, 15)
    start = {name: 0 * value for name, value in start.items()}
    for step in gradients:
        step.update({name: scale * value for name, value in step.items()})
    ours, optimizer = run(start, gradients, dtype)
    assert is_finite(ours, optimizer)
    if dtype == torch.float64:
        assert_near(ours, trajectory(start, gradients), 1e-8)
    sizes = [np.abs(ours[-1][name]).max() / scale for name in start]
    assert min(sizes) > 0.01 and max(sizes) < 1000


@each_dtype
def test_a_spike_is_forgotten(dtype):
    """One gradient is 1e6 times as large: F is dominated by it, and recovers."""
    start, gradients = random_start(HARD), random_gradients(HARD, 60)
    gradients[20] = {name: 1e6 * value for name, value in gradients[20].items()}
    settings = {"momentum": 0.0, "nesterov": False, "lr": 1.0, "update_period": 1}
    ours, optimizer = run(start, gradients, dtype, **settings)
    assert is_finite(ours, optimizer)
    for index in (21, 40, 59) if dtype == torch.float64 else ():
        for name, gradient in gradients[index].items():
            step = ours[index - 1][name] - ours[index][name]
            assert np.linalg.norm(step) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
