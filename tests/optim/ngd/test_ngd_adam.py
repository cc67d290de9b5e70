"""Groups that NGD steps as AdamW does."""

import numpy as np
import pytest
import torch
from ngd_tools import (
    assert_near,
    random_gradients,
    random_start,
    run,
    train,
    weights,
)

from utils.optim.ngd.optimizer import NGD

SHAPES = {"table": (20, 6), "scale": (7,), "scalar": (), "conv": (4, 3, 2, 2)}


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_the_formula(decoupled):
    """m = .9 m + .1 g, v = .999 v + .001 g^2, p = p - lr m' / (sqrt(v') + 1e-8), m' and v' without
    their bias."""
    start, gradients = random_start(SHAPES), random_gradients(SHAPES, 50)
    lr, decay, expected = 0.01, 0.1, []
    moments = {name: (0 * value, 0 * value) for name, value in start.items()}
    now = dict(start)
    for count, step in enumerate(gradients, 1):
        for name, gradient in step.items():
            value = now[name] * (1 - lr * decay) if decoupled else now[name]
            gradient = gradient if decoupled else gradient + decay * value
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            moments[name] = m, v
            root = np.sqrt(v / (1 - 0.999**count)) + 1e-8
            now[name] = value - lr * m / (1 - 0.9**count) / root
        expected.append(dict(now))
    settings = {"lr": lr, "weight_decay": decay, "decoupled": decoupled}
    ours, _ = run(start, gradients, adam=True, **settings)
    assert_near(ours, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs_adamw_to_the_bit(dtype):
    plain, ours = weights(dtype=dtype), weights(dtype=dtype)
    train(torch.optim.AdamW(plain, lr=0.01, weight_decay=0.1, fused=True), plain, range(20))
    train(NGD(ours, lr=0.01, weight_decay=0.1, decoupled=True, adam=True), ours, range(20))
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)
