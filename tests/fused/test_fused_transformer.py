"""Fused Transformer layers against the plain ones, and the memory that they save."""

import pytest
import torch
import torch.nn.functional as F
from fused_tools import assert_close, found, pair
from torch import nn

from benchmarks.fused import bytes_kept
from utils.fused import fuse
from utils.fused.transformer import feed_forward, norm_linear
from utils.models.text_layout import grid_layout
from utils.models.transformer import EncoderLayer, Transformer
from utils.optim.factory import build_optimizer

IDS = torch.randint(1, 30, (6, 10), generator=torch.Generator().manual_seed(0))
IDS[2:, 7:] = 0
DIRECTION = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


MODES = pytest.mark.parametrize("mode", ["memory", "speed"])


def transformers(rate=0.3, mode="memory", **options):
    torch.manual_seed(0)
    return pair(Transformer(30, 3, 2, 16, 2, 24, 12, rate, **options), mode)


def parts():
    torch.manual_seed(0)
    norm, fc1, fc2 = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return nn.ModuleList([norm, fc1, fc2]).double()


@MODES
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_gradients_equal_finite_differences(rate, mode):
    norm, fc1, fc2 = parts()
    x, branch = torch.randn(2, 4, 6, dtype=torch.float64)
    x.requires_grad_(), branch.requires_grad_()

    def ffn(x, branch, *weights):
        torch.manual_seed(0)
        return feed_forward(x, branch, norm, fc1, fc2, rate, mode)

    def linear(x, *weights):
        return norm_linear(norm, x, fc1.weight, fc1.bias, mode)

    weights = [p for module in (norm, fc1, fc2) for p in module.parameters()]
    assert torch.autograd.gradcheck(ffn, (x, branch, *weights))
    assert torch.autograd.gradcheck(linear, (x, *weights[:4]))


@MODES
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, {"rate": 0.0}], ids=str)
def test_it_equals_the_plain_one(options, training, half, mode):
    results = []
    for model in transformers(mode=mode, **options):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            results.append(found(model.train(training), IDS, DIRECTION))
    results = [{name: t for name, t in r.items() if t is not None} for r in results]
    if half:
        exact = found(transformers(**options)[0].double().train(training), IDS, DIRECTION.double())
        plain, fused = (
            sum((r[n].double() - t).norm() / (t.norm() + 1e-3) for n, t in exact.items() if n in r)
            for r in results
        )
        if not training or not options.get("rate", 0.3):  # with dropout, float64 draws other masks
            assert fused <= plain * 1.02
        assert_close(*results, rtol=0.05, atol=0.05)
    else:
        assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "mode", "dtype", "tolerance"),
    [
        ("sgd", "memory", torch.float32, 1e-6),
        ("sgd", "speed", torch.float32, 1e-6),
        # Normalised steps magnify rounding errors, above all where a gradient is 0 by symmetry, as
        # for the biases of keys: how far in float32 depends on the CPU.
        ("sgd", "memory", torch.float64, 1e-12),
        ("ngd", "memory", torch.float64, 1e-12),
        ("ngd", "speed", torch.float64, 1e-12),
        ("muon", "memory", torch.float64, 1e-12),
        ("adamw", "speed", torch.float64, 1e-12),
        ("adamw", "memory", torch.float64, 1e-12),
    ],
)
def test_twenty_steps_equal_the_plain_ones(optimizer, mode, dtype, tolerance):
    models = transformers(rate=0.1, mode=mode)
    for model in models:
        model.to(dtype)
        torch.manual_seed(1)
        lr = 0.1 if optimizer == "sgd" else 1e-3
        steps = build_optimizer(optimizer, model, lr=lr, weight_decay=1e-3)
        for step in range(20):
            ids = IDS.roll(step, 0)
            F.cross_entropy(model(ids), torch.arange(6) % 3).backward()
            steps.step()
            steps.zero_grad()
    plain, fused = models
    assert_close(plain.state_dict(), fused.state_dict(), rtol=0, atol=tolerance)
    torch.testing.assert_close(fused.eval()(IDS), plain.eval()(IDS), rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_it_saves_memory(half):
    torch.manual_seed(0)
    layout = grid_layout(torch.full((64,), 16), 16)
    x = torch.randn(64 * 16, 64, requires_grad=True)

    def call(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return model(x, layout)

    layer = EncoderLayer(64, 2, 128, 0.1, 0.0)
    plain, memory, speed = (
        bytes_kept(fuse(layer, mode), call) for mode in ("none", "memory", "speed")
    )
    assert memory < 0.68 * plain
    assert speed < 0.9 * plain


def test_a_second_derivative_is_refused():
    model = transformers()[1]
    weight = model.layers[0].fc1.weight
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(IDS).sum(), weight, create_graph=True)
