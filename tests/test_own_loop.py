"""What utils/own_loop.py has for a training loop of one's own."""

import math
import random

import numpy as np
import pytest
import torch

from utils.own_loop import EarlyStopping, same_seeds


def test_same_seeds():
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    try:
        drawn = []
        for seed in (3, 3, 4):
            same_seeds(seed)
            drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        assert drawn[0] == drawn[1] and not {*drawn[0]} & {*drawn[2]}
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@pytest.mark.parametrize(
    ("patience", "delta", "losses", "stops"),
    [
        (2, 0.0, [3, 2, 2, 1, 1, 1.5], [0, 0, 0, 0, 0, 1]),
        (1, 0.0, [3, 3], [0, 1]),
        (2, 0.5, [3, 2.6, 2.4, 2, 1.9], [0, 0, 0, 0, 1]),
        (2, 0.0, [math.nan, math.nan, 1], [0, 1, 0]),
        (1, 0.0, [torch.tensor(1.0), torch.tensor(2.0)], [0, 1]),
    ],
)
def test_early_stopping(patience, delta, losses, stops):
    stopping = EarlyStopping(patience, delta=delta)
    assert [stopping(loss) for loss in losses] == [bool(stop) for stop in stops]
    assert stopping.early_stop == bool(stops[-1]) and isinstance(stopping.best, float)


@pytest.mark.parametrize("values", [{"patience": 0}, {"delta": -1.0}, {"delta": math.nan}])
def test_values_of_early_stopping_that_make_no_sense(values):
    with pytest.raises(ValueError, match="patience is 1 or more, delta 0 or more"):
        EarlyStopping(**values)


def test_early_stopping_counts_aloud_and_saves_no_model(capsys):
    stopping = EarlyStopping(patience=30, verbose=True)
    assert not stopping(1.0) and not stopping(2.0)
    assert capsys.readouterr().out == "early stopping: 1 of 30\n"
    with pytest.raises(TypeError, match="save it where counter is 0"):
        stopping(1.0, torch.nn.Linear(1, 1))
