"""--layer_decay, --head_lr and --adam_lr_scale: parameters with learning rates of their own."""

import copy

import pytest
import torch

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.errors import UserError
from utils.models.vit import ViT
from utils.optim.factory import build_optimizer
from utils.optim.schedules import build_schedule
from utils.optim.table import OPTIMIZERS
from utils.runs.optimization import lr_scales

LR = 0.01


def vit() -> ViT:
    torch.manual_seed(0)
    return ViT(5, 8, 8, layers=3, dim=16, heads=2, ffn=32).double()


def test_scales():
    model = vit()
    assert lr_scales(model) is None
    scales = lr_scales(model, 0.5, 3.0)
    by_name = {name: scales[p] for name, p in model.named_parameters()}
    assert by_name["pos_embed"] == by_name["patch_embed.proj.weight"] == 0.5**4
    assert by_name["blocks.0.mlp.fc1.weight"] == 0.5**3
    assert by_name["blocks.2.norm1.bias"] == by_name["norm.weight"] == 0.5
    assert by_name["head.weight"] == by_name["head.bias"] == 3.0
    assert {*lr_scales(model, head_scale=3.0).values()} == {1.0, 3.0}
    assert lr_scales(model, 0.5)[model.head.weight] == 1.0


def test_a_step_of_sgd_is_scaled():
    """Against plain gradient descent with a rate for each parameter."""
    model = vit()
    scales = lr_scales(model, 0.5, 3.0)
    optimizer = build_optimizer(
        "sgd", model, lr=LR, weight_decay=0.0, momentum=0.0, lr_scales=scales
    )
    schedule = build_schedule("constant", lr=LR, total_steps=4, steps_per_epoch=4, warmup_steps=2)
    schedule.apply(optimizer, 0)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        expected = old - LR / 2 * scales[parameter] * parameter.grad
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-12)


def at_work(name: str, model, scales, lr: float = 1e-3, **more) -> torch.optim.Optimizer:
    """The optimizer, with the rates that a schedule sets."""
    own = OPTIMIZERS[name].own_defaults() | more
    optimizer = build_optimizer(name, model, lr=lr, weight_decay=0.1, lr_scales=scales, **own)
    build_schedule("constant", lr=lr, total_steps=4, steps_per_epoch=4).apply(optimizer, 0)
    return optimizer


def step(model, optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scales_of_one_change_nothing(name):
    """The groups are divided, the steps are not."""
    weights, groups = [], []
    for ones in (None, (1.0, 1.0 + 2**-50)):
        model = vit()
        scales = ones and {p: ones[i % 2] for i, p in enumerate(model.parameters())}
        optimizer = at_work(name, model, scales)
        groups.append(len(optimizer.param_groups))
        for seed in range(4):
            step(model, optimizer, seed)
        weights.append([p.detach() for p in model.parameters()])
    assert groups[1] > groups[0]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("before", (None, 3.0))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_its_parameters_in_other_groups(name, before):
    """Where --lr has become equal to --head_lr, or is so no more."""
    model = vit()
    optimizer = at_work(name, model, lr_scales(model, head_scale=before))
    for seed in range(3):
        step(model, optimizer, seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors, rest = optimizer_tensors(optimizer, names)
    again = copy.deepcopy(model)
    names = {parameter: name for name, parameter in again.named_parameters()}
    resumed = at_work(name, again, lr_scales(again, head_scale=None if before else 3.0))
    restore_optimizer(resumed, names, tensors, rest)
    assert len(resumed.param_groups) != len(optimizer.param_groups)
    for group in optimizer.param_groups + resumed.param_groups:
        group["lr"] = 1e-3
    for seed in range(3, 5):
        step(model, optimizer, seed)
        step(again, resumed, seed)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_run_goes_on_with_a_first_group_that_is_empty():
    """Where nothing that trains has weight decay."""
    model = vit()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = at_work("adamw", model, None)
    assert not optimizer.param_groups[0]["params"]
    step(model, optimizer, 0)
    tensors, rest = optimizer_tensors(optimizer, names)
    resumed = at_work("adamw", model, None)
    restore_optimizer(resumed, names, tensors, rest)
    assert len(resumed.state) == len(optimizer.state) > 0


def test_groups_with_other_numbers_of_steps_are_not_joined():
    model = vit()
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = at_work("lamb", model, lr_scales(model, head_scale=3.0))
    step(model, optimizer, 0)
    tensors, rest = optimizer_tensors(optimizer, names)
    rest["groups"][-1]["step"] += 1
    with pytest.raises(UserError, match="other groups"):
        restore_optimizer(at_work("lamb", model, None), names, tensors, rest)
    del rest["groups"][-1]
    with pytest.raises(UserError, match="other parameters"):
        restore_optimizer(at_work("lamb", model, None), names, tensors, rest)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_the_rates_of_its_groups(name):
    model = vit()
    scales = {p: 1.0 for p in model.parameters()} | {model.patch_embed.proj.weight: 1e-6}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(model, at_work(name, model, scales), 0)
    moved = {
        n: ((p - before[n]).norm() / before[n].norm()).item()
        for n, p in model.named_parameters()
        if p.ndim > 1
    }
    assert 0 < moved["patch_embed.proj.weight"] < 0.01 * moved["blocks.0.mlp.fc1.weight"]


@pytest.mark.parametrize("name", ("muon", "ngd"))
def test_adam_takes_a_rate_of_its_own(name):
    """What Adam steps moves as it does at a quarter of the rate, all else as at the whole."""
    moved = []
    for lr, scale in ((1e-3, 0.25), (1e-3, 1.0), (2.5e-4, 1.0)):
        model = vit()
        before = [p.detach().clone() for p in model.parameters()]
        heads = [*model.head.parameters()]
        step(model, at_work(name, model, None, lr, adam_lr_scale=scale, heads=heads), 0)
        moved.append([p.detach() - old for p, old in zip(model.parameters(), before, strict=True)])
    slow = {n for n, p in model.named_parameters() if p.ndim < 2 or n in ("cls_token", "pos_embed")}
    slow.add("head.weight")
    for (n, _), ours, whole, quarter in zip(model.named_parameters(), *moved, strict=True):
        torch.testing.assert_close(ours, quarter if n in slow else whole, rtol=1e-12, atol=1e-15)
        assert not torch.allclose(whole, quarter)


@pytest.mark.parametrize("name", ("muon", "ngd"))
def test_the_heads_rate_is_the_one_that_was_asked_for(name):
    model = vit()
    heads = [*model.head.parameters()]
    scales = lr_scales(model, 0.5, 3.0)
    own = OPTIMIZERS[name].own_defaults() | {"adam_lr_scale": 0.25, "heads": heads}
    groups = build_optimizer(
        name, model, lr=LR, weight_decay=0.1, lr_scales=scales, exact=heads, **own
    ).param_groups
    rates = {p: group["base_lr"] / LR for group in groups for p in group["params"]}
    assert [rates[p] for p in heads] == [3.0, 3.0]
    block = model.blocks[2]
    assert (rates[block.mlp.fc1.weight], rates[block.mlp.fc1.bias]) == (0.5, 0.125)
