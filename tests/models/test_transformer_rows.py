"""Packed rows: their number, the effect of unused ones, and conversion to and from the grid."""

import pytest
import torch
from small_transformer import CPU, WAYS, model, packed, texts

from utils.fused import MODES, fuse
from utils.mixup.mixing import MixPlan
from utils.models import text_layout, transformer
from utils.models.text_layout import grid_layout, packed_layout, rows_for


def test_the_number_of_rows_takes_few_values_where_each_is_compiled():
    assert rows_for(77, CPU) == 77
    with torch.autocast("cpu", torch.bfloat16):
        assert rows_for(77, torch.device("cuda")) == 77
        assert [rows_for(n, CPU) for n in (0, 1, 64, 65, 4000)] == [0, 64, 64, 128, 4032]
        assert rows_for(10_000, CPU) == 10_240 and rows_for(10_240, CPU) == 10_240
        assert len({rows_for(n, CPU) for n in range(8192, 16_384)}) <= 33
        for n in range(64, 100_000, 37):
            assert 0 <= rows_for(n, CPU) - n <= max(63, n / 32)


@pytest.mark.parametrize("fused", MODES)
@pytest.mark.parametrize("lengths", [[3, 8, 1, 5], [4, 4], [1]])
@pytest.mark.parametrize(("pooling", "mixup_at"), WAYS)
def test_unused_rows_change_nothing(pooling, mixup_at, lengths, fused, monkeypatch):
    """Logits and all gradients with seven unused rows and without, in float64 without dropout."""
    ours = model(dtype=torch.float64, pooling=pooling, mixup_at=mixup_at)
    ours, inputs, found = fuse(ours, fused), packed(texts(lengths)), []
    n = len(lengths)
    plan = MixPlan(torch.arange(n).flip(0), torch.linspace(0.2, 0.9, n, dtype=torch.float64))
    for more in (0, 7):
        monkeypatch.setattr(transformer, "rows_for", lambda tokens, _, more=more: tokens + more)
        for mixing in (None, plan):
            ours.zero_grad()
            logits = ours(inputs, mixing)
            logits.square().sum().backward()
            found.append([logits.detach(), *(p.grad.clone() for p in ours.parameters())])
    for without, with_more in zip(found[:2], found[2:], strict=True):
        for one, other in zip(without, with_more, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("fused", MODES)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_rounded_rows_under_autocast(pooling, fused):
    ours, inputs, found = model(pooling=pooling), packed(texts([4, 9, 1])), []
    ours = fuse(ours, fused)
    for rounds in (True, False):
        ours.rounds_rows = rounds
        ours.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = ours(inputs)
        logits.float().square().sum().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in ours.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_rows_are_not_rounded_for_the_grid(monkeypatch):
    asked = []
    monkeypatch.setattr(transformer, "rows_for", lambda n, device: asked.append(n) or n)
    plan = MixPlan(torch.tensor([1, 0]), torch.tensor([0.3, 0.9]))
    for mixup_at in ("embeddings", "sentence"):
        ours = model(mixup_at=mixup_at)
        ours(packed(texts([3, 2])), plan)
    assert asked == [5]


def test_second_derivatives_with_unused_rows():
    place = torch.tensor([4, 0, 3])
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    grid = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    for call, inputs in (
        (text_layout._Scatter, (rows, place, 6)),
        (text_layout._Gather, (grid, place, 5)),
    ):
        assert torch.autograd.gradcheck(call.apply, inputs)
        assert torch.autograd.gradgradcheck(call.apply, inputs)
    spread = text_layout._Scatter.apply(rows, place, 6)
    assert torch.equal(text_layout._Gather.apply(spread, place, 5)[:3], rows[:3])
    assert not text_layout._Gather.apply(spread, place, 5)[3:].any()


def test_to_grid_and_from_grid_are_inverse():
    inputs = packed(texts([3, 1, 4]))
    layout, rows = packed_layout(inputs, 8), torch.randn(8, 5)
    grid = layout.to_grid(rows)
    assert grid.shape == (3, 4, 5) and torch.equal(layout.from_grid(grid), rows)
    assert not grid[0, 3].any() and not grid[1, 1:].any() and torch.equal(grid[2], rows[4:])
    assert torch.equal(layout.first(rows), rows[[0, 3, 4]])
    assert torch.equal(grid_layout(layout.lengths, 4).keys, layout.keys)
    torch.testing.assert_close(layout.mean(rows)[2], rows[4:].mean(0))
