"""The first steps from zero-initialised residual branches: the gradients of a branch's convolutions
are exactly 0 then, and a step of fixed length divides by the length of the gradient."""

import copy

import pytest
import torch
from own_optimizers import OWN

import resnet50_test
from utils.fused import MODES, fuse
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.optim.table import OPTIMIZERS
from utils.settings.config import parse
from utils.training.objective import Classification, Precision
from utils.weights.card import ModelCard

# All optimizers, and NGD's other form.
WAYS = {name: (name, {}) for name in OWN} | {
    "ngd of the gradient's length": ("ngd", {"ngd_norm": "gradient"}),
    "lookahead sgd": ("sgd", {"lookahead_k": 2}),
}


# All modes and precisions with two of them; the others see each mode and each precision.
CASES = [
    (way, fused, precision)
    for way in WAYS
    for i, fused in enumerate(MODES)
    for j, precision in enumerate(("fp32", "bf16"))
    if way in ("sgd", "ngd") or i % 2 == j
]


@pytest.mark.parametrize(("way", "fused", "precision"), CASES)
def test_the_first_steps_are_finite_and_every_branch_learns(way, fused, precision):
    torch.manual_seed(0)
    model = ResNet(18, 3, width=4, zero_init_residual=True)
    model = fuse(model.to(memory_format=torch.channels_last), fused).train()
    precision = Precision(precision, torch.device("cpu"))
    name, own = WAYS[way]
    entry = OPTIMIZERS[name]
    rates = {"lr": 0.01, "weight_decay": 0.0}
    optimizer = build_optimizer(name, model, **rates, **own, **entry.products(precision.name))
    objective = Classification(model, precision)
    start = copy.deepcopy(model.state_dict())
    branches = [n for n in start if ".conv" in n]  # those of the blocks; downsampling has none
    norms = [n for n in start if n.startswith("layer") and n.endswith("bn2.weight")]
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(6, 3, 16, 16).to(memory_format=torch.channels_last)
        objective(inputs, torch.tensor([0, 1, 2, 0, 1, 2]))[0].div(6).backward()
        if step == 0:
            assert not any(model.get_parameter(n).grad.any() for n in branches)
            assert all(model.get_parameter(n).grad.any() for n in norms)
        optimizer.step()
        now = model.state_dict()
        assert all(tensor.isfinite().all() for tensor in now.values()), step
        if step == 0:
            # madgrad rounds, as it starts again from the first weights in every step.
            for n in branches:
                torch.testing.assert_close(now[n], start[n], rtol=1e-6, atol=1e-6)
    assert len(norms) == 8
    assert all(now[n].all() for n in norms)
    assert not any(torch.equal(now[n], start[n]) for n in branches)
    for state in optimizer.state.values():
        assert all(torch.as_tensor(value).isfinite().all() for value in state.values())


@pytest.mark.parametrize("flags", [[], ["--no_zero_init_residual"]], ids=str)
def test_the_entry_builds_such_a_model_unless_told_otherwise(flags):
    settings, _ = parse(resnet50_test.Settings, ["--depth", "18", "--width", "4", *flags], "")
    card = ModelCard(("a", "b"), (0.5,) * 3, (0.5,) * 3, 16, 16, 3)
    scales = {
        name: parameter
        for name, parameter in resnet50_test.build_model(settings, card).named_parameters()
        if parameter.ndim == 1 and name.endswith("weight")
    }
    zero = {name for name, scale in scales.items() if not scale.any()}
    blocks = {f"layer{stage}.{block}.bn2.weight" for stage in (1, 2, 3, 4) for block in (0, 1)}
    assert zero == (set() if flags else blocks)
    assert all((scale == 1).all() for name, scale in scales.items() if name not in zero)
