"""--sampler grid: every combination of the grid points that apply."""

import optuna
import pytest
from finished_studies import rows
from small_spaces import space_of

from tuning.halving import SeededSampler
from utils.errors import UserError
from utils.optim.table import OPTIMIZERS

OPTIMIZER = "optimizer: {choices: [sgd, adamw]}\nlr: {of: optimizer}\n"
MOMENTUM = "momentum: {low: 0.8, high: 0.95, grid: [0.9]}\n"


def test_points_have_the_settings_that_apply_to_them(space_file):
    space, _, _ = space_of(space_file(OPTIMIZER + MOMENTUM))
    rates = {name: OPTIMIZERS[name].ranges["lr"][0].grid for name in ("sgd", "adamw")}
    assert space.grid() == [
        *({"optimizer": "sgd", "lr.1": lr, "momentum": 0.9} for lr in rates["sgd"]),
        *({"optimizer": "adamw", "lr.2": lr} for lr in rates["adamw"]),
    ]


def test_a_parameter_that_applies_to_some_points_needs_a_grid(space_file):
    path = space_file(
        "optimizer: {choices: [sgd, adamw]}\n"
        "lr:\n"
        "  - {when: {optimizer: sgd}, low: 0.1, high: 1.0, grid: [0.1]}\n"
        "  - {when: {optimizer: adamw}, low: 0.0001, high: 0.01, scale: log}\n"
    )
    with pytest.raises(UserError, match="--sampler grid: lr has no grid points in the space"):
        space_of(path)[0].grid()


def test_a_grid_draws_nothing():
    study = optuna.create_study(sampler=SeededSampler("grid", 0))
    study.enqueue_trial({"a": 0.5})
    trial = study.ask()
    assert trial.suggest_float("a", 0, 1) == 0.5
    with pytest.raises(UserError, match="has no grid point of b; start a new study"):
        trial.suggest_float("b", 0, 1)


@pytest.mark.slow
def test_a_grid_of_optimizers(search, tmp_path, space_file):
    """Each with its own learning rates."""
    words = ["--space", space_file(OPTIMIZER), "--sampler", "grid", "--confirm", "0"]
    code, _, err = search(*words)
    assert code == 0, err
    points = [(row["optimizer"], float(row["lr"])) for row in rows(tmp_path / "study")]
    assert len(points) == len({*points})
    grid = {(n, lr) for n in ("sgd", "adamw") for lr in OPTIMIZERS[n].ranges["lr"][0].grid}
    assert {*points} == grid | {("sgd", OPTIMIZERS["sgd"].lr)}


@pytest.mark.slow
def test_a_grid_of_choices(search, tmp_path):
    """All points are tried, the default once."""
    space = tmp_path / "space.yaml"
    space.write_text(
        "sched: {choices: [cosine, linear]}\n"
        "lr: {low: 0.01, high: 1, scale: log, grid: [0.03, 0.1]}\n"
        "gamma: {low: 0.1, high: 0.5, scale: log, grid: [0.1, 0.3]}\n"
    )
    words = ["--space", space, "--sampler", "grid", "--confirm", "0"]
    code, out, err = search(*words, "--trials", "3")
    assert code == 0, err
    assert "1 of 4 points of the grid are left out" in out
    code, out, err = search(*words)
    assert code == 0, err
    found = [(row["sched"], row["lr"]) for row in rows(tmp_path / "study")]
    assert len(found) == 4 == len({*found})
    assert (tmp_path / "study" / "grid.png").stat().st_size


@pytest.mark.slow
def test_points_of_a_grid(search, tmp_path):
    words = ["--sampler", "grid", "--mixup", "fixed", "--sched", "step"]
    code, out, err = search(*words, "--params", "alpha,gamma", "--confirm", "0")
    assert code == 0, err
    found = rows(tmp_path / "study")
    points = {(float(row["alpha"]), float(row["gamma"])) for row in found}
    grid = {(a, g) for a in (0.2, 1.0) for g in (0.1, 0.3)}
    assert points == grid  # which contains the default
    assert "[4/4]" in out
    assert len(found) == 4 and {row["state"] for row in found} == {"complete"}
    assert (tmp_path / "study" / "grid.png").stat().st_size
    code, _, err = search(*words, "--params", "alpha,gamma", "--confirm", "0")
    assert code == 0, err
    assert len(rows(tmp_path / "study")) == 4
