"""Checks of the Triton kernels in Triton's interpreter on the CPU. test_kernels.py runs them in a
process where TRITON_INTERPRET=1 is set before Triton is imported.

Results are compared with PyTorch in float64. The interpreter truncates float32 to bf16 where a GPU
rounds; here it is patched to round.
"""

import copy
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from fused_tools import found
from test_fused_convolution import CASES, DIRECTION, blocks, networks, pictures
from test_fused_cross_entropy import LAMS, batch
from test_fused_transformer import DIRECTION as OF_TEXTS
from test_fused_transformer import IDS, transformers
from triton.runtime import interpreter

from utils.check.arithmetic import ALLOWED, largest_differences
from utils.fused import kernels
from utils.fused.cross_entropy import fused_cross_entropy
from utils.fused.kernels import image_kernels, layer_kernels
from utils.training.objective import mixed_cross_entropy

assert os.environ.get("TRITON_INTERPRET") == "1"

FULL, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF_STEP = {FP16: 2**-11, BF16: 2**-8}
IMAGES = pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5, 4, 7), FULL), ((1, 1, 1, 2), FULL), ((2, 130, 3, 3), FULL), ((2, 3, 37, 29), FULL),
     ((1, 8, 3, 2), FULL), ((2, 5, 14, 7), FP16), ((2, 5, 14, 7), BF16)],
    ids=str,
)  # fmt: skip
ROWS = pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 7), FULL), ((1, 16), FULL), ((3, 1), FULL), ((4, 300), FULL), ((13, 7), FULL),
     ((5, 7), FP16), ((5, 7), BF16)],
    ids=str,
)  # fmt: skip


def rounded(data, source, target, mode, cut=interpreter._convert_float):
    if (source, target) != (tl.float32, tl.bfloat16):
        return cut(data, source, target, mode)
    values = torch.tensor(data, dtype=torch.float32).to(torch.bfloat16)
    return values.view(torch.int16).numpy().view(np.uint16)


def with_whole_numbers(tensor, scope, patch=interpreter._patch_lang_tensor):
    """Before Triton 3.8, bounds of a range() are one-element arrays given to int(), which NumPy 2.4
    rejects."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda value: value.handle.data.item())


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch):
    """Kernels with small tiles, so that a program loops over several."""
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(image_kernels, "TILE", 512)
    monkeypatch.setattr(layer_kernels, "TILE", 16)
    for module in (image_kernels, layer_kernels):
        monkeypatch.setattr(module, "PROGRAMS", 3)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_whole_numbers)
    torch.manual_seed(0)


def near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Tolerance: 1e-6 of the largest value, and in half precision a rounding error besides."""
    assert exact.dtype == torch.float64 and ours.dtype != torch.float64
    difference = (ours.double() - exact).abs()
    allowed = 1e-6 * exact.abs().max() + HALF_STEP.get(ours.dtype, 0) * exact.abs() + 1e-7
    assert (difference <= allowed).all(), (difference - allowed).max()


def images(shape, dtype, count):
    return [torch.randn(shape).to(dtype, memory_format=torch.channels_last) for _ in range(count)]


def rows(shape, dtype, count):
    return [torch.randn(shape).to(dtype) for _ in range(count)]


def wide(channels):
    return channels.double()[:, None, None]


# ---- images -------------------------------------------------------------------------------------


@IMAGES
def test_affine(shape, dtype):
    c, add = images(shape, dtype, 2)
    scale, shift, scale2, shift2 = torch.randn(4, shape[1])
    kept = torch.empty(shape[0], 1, 1, 1, dtype=dtype).bernoulli_(0.5)
    y = c.double() * wide(scale) + wide(shift)
    cases = [
        ((True,), y.relu()),
        ((False,), y),
        ((True, None, 1.0, add), (y + add.double()).relu()),
        ((True, kept, 0.7, add), (y * kept.double() / 0.7 + add.double()).relu()),
        (
            (True, None, 1.0, add, scale2, shift2),
            (y + add.double() * wide(scale2) + wide(shift2)).relu(),
        ),
    ]
    for arguments, wanted in cases:
        out = torch.empty_like(c)
        assert image_kernels.affine(c, scale, shift, *arguments, out=out) is out
        near(out, wanted)


def test_nan_is_propagated():
    (c,) = images((1, 1, 1, 2), torch.float32, 1)
    c[0, 0, 0, 0] = torch.nan
    one = torch.ones(1)
    y = image_kernels.affine(c, one, one, True, out=torch.empty_like(c))
    assert y.isnan().any()
    sums = image_kernels.gradient_sums(
        c, c, image_kernels.ChannelValues(*[one] * 4), y=y, relu_grad=torch.empty_like(c)
    )
    assert sums.isnan().all()


@IMAGES
def test_statistics(shape, dtype):
    (c,) = images(shape, dtype, 1)
    channels = shape[1]
    weight, bias, mean, var = torch.randn(channels), torch.randn(channels), *torch.rand(2, channels)
    wanted = [mean.double(), var.double()]
    F.batch_norm(c.double(), *wanted, training=True, momentum=0.3)
    for w, b in ((weight, bias), (None, None)):
        running = [mean.clone(), var.clone()]
        numbers = image_kernels.batch_values(c, w, b, 1e-5, *running, 0.3)
        variance, middle = torch.var_mean(c.double(), (0, 2, 3), correction=0)
        spread = (variance + 1e-5).rsqrt()
        scale = spread if w is None else spread * w.double()
        shift = -middle * scale + (0 if b is None else b.double())
        for ours, exact in zip([*numbers, *running], [middle, spread, scale, shift, *wanted],
                               strict=True):  # fmt: skip
            near(ours, exact)
    unchanged = mean.clone()
    image_kernels.batch_values(c, weight, bias, 1e-5, None, None, 0.0)
    assert torch.equal(mean, unchanged)


def test_statistics_far_from_zero():
    """Where the mean of squares minus the squared mean would have no correct digit."""
    c = (3000 + torch.randn(4, 3, 40, 40)).to(memory_format=torch.channels_last)
    c[0, 0, 0, 0] = -3000
    spread = image_kernels.batch_values(c, None, None, 1e-5, None, None, 0.0).inverse_std
    exact = (c.double().var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(spread.double(), exact, rtol=1e-4, atol=0)


@IMAGES
@pytest.mark.parametrize("gate", ["none", "of y", "only norm"])
def test_the_backward_pass_of_batch_norm(shape, gate, dtype):
    grad, c, add = images(shape, dtype, 3)
    weight, bias = torch.randn(2, shape[1])
    numbers = image_kernels.batch_values(c, weight, bias, 1e-5, None, None, 0.0)
    y = relu_grad = None
    exact = [t.double().requires_grad_() for t in (c, weight, bias)]
    normal = F.batch_norm(exact[0], None, None, *exact[1:], training=True)
    if gate == "of y":
        y = image_kernels.affine(c, *numbers[2:], True, residual=add, out=torch.empty_like(c))
        relu_grad = torch.empty_like(c)
    dy = grad.double()
    if gate != "none":
        dy = dy * ((normal if y is None else y) > 0)
    of_c, of_weight, of_bias = torch.autograd.grad(normal, exact, dy)
    only_norm = gate == "only norm"
    sums = image_kernels.gradient_sums(grad, c, numbers, relu=only_norm, y=y, relu_grad=relu_grad)
    near(sums, torch.stack([of_bias, of_weight]))
    if relu_grad is not None:
        assert torch.equal(relu_grad.double(), dy)
        grad = relu_grad
    out = torch.empty_like(c)
    image_kernels.input_gradient(grad, c, numbers, sums, relu=only_norm, out=out)
    if shape[0] * shape[2] * shape[3] > 2:  # with two values the gradient is almost 0
        near(out, of_c)


def test_sums_of_several_groups_of_programs(monkeypatch):
    """40 programs in 10 groups."""
    monkeypatch.setattr(image_kernels, "TILE", 32)
    monkeypatch.setattr(image_kernels, "PROGRAMS", 40)
    for _ in range(2):  # the first leaves nothing behind
        test_statistics((2, 5, 14, 7), FULL)
        test_the_backward_pass_of_batch_norm((2, 5, 14, 7), "none", FULL)


def test_invalid_layouts_are_refused():
    rows_first = torch.randn(2, 3, 4, 4)
    one = torch.ones(3)
    with pytest.raises(ValueError, match="channels_last"):
        image_kernels.affine(rows_first, one, one, True, out=rows_first)
    last = rows_first.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="one shape"):
        image_kernels.affine(last, one, one, True, out=last[:1])
    with pytest.raises(ValueError, match="contiguous"):
        layer_kernels.gelu_dropped(torch.randn(4, 3).t(), None, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        layer_kernels.mixed_cross_entropy(torch.randn(4, 3).t(), *torch.zeros(3, 3), 0.0)


def test_which_tensors_get_kernels():
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert kernels.unusable() is None
    assert kernels.images(last, last) is image_kernels
    assert kernels.images(last, last.contiguous()) is None
    assert kernels.images(last.double()) is None and kernels.images(last[:0]) is None
    assert kernels.layers(torch.ones(2, 3)) is layer_kernels
    assert kernels.layers(torch.ones(2, 3).t()) is None
    assert kernels.layers(torch.ones(1, 1 << 15)) is None


def test_sizes_equal_tritons():
    for n in range(1, 70):
        assert kernels.power_of_2(n) == triton.next_power_of_2(n)
        assert kernels.ceil_div(n, 7) == triton.cdiv(n, 7)


# ---- layers and loss ----------------------------------------------------------------------------


@ROWS
@pytest.mark.parametrize("masked", [True, False], ids=["dropout", "none"])
def test_elementwise_kernels(masked, shape, dtype):
    x, branch, grad = rows(shape, dtype, 3)
    mask = torch.empty(shape, dtype=torch.uint8).bernoulli_(0.7) if masked else None
    factor = 1 / 0.7 if masked else 1.0
    times = mask.double() * factor if masked else 1.0
    near(layer_kernels.add_dropped(None, branch, mask, factor), branch.double() * times)
    near(layer_kernels.add_dropped(x, branch, mask, factor), x.double() + branch.double() * times)
    exact = branch.double().requires_grad_()
    y = F.gelu(exact) * times
    near(layer_kernels.gelu_dropped(branch, mask, factor), y.detach())
    (wanted,) = torch.autograd.grad(y, exact, grad.double())
    near(layer_kernels.gelu_dropped_backward(grad, branch, mask, factor), wanted)


@ROWS
@pytest.mark.parametrize("masked", [True, False], ids=["dropout", "none"])
def test_layer_norm(masked, shape, dtype):
    """With the residual stream in float32; branch and output also in half precision."""
    (x, residual), (branch, grad) = rows(shape, torch.float32, 2), rows(shape, dtype, 2)
    mask = torch.empty(shape, dtype=torch.uint8).bernoulli_(0.7) if masked else None
    factor = 1 / 0.7 if masked else 1.0
    scale, shift = torch.randn(2, shape[1])
    exact = [t.double().requires_grad_() for t in (x, branch, scale, shift)]
    z = exact[0] + exact[1] * (mask.double() * factor if masked else 1.0)
    normal = F.layer_norm(z, shape[1:], *exact[2:], eps=0.1)
    found = layer_kernels.add_norm(x, branch, mask, factor, scale, shift, 0.1, dtype)
    near(found[0], z.detach())
    near(found[1], normal.detach())
    assert found[1].dtype == dtype
    again = layer_kernels.add_norm(found[0], None, None, 1.0, scale, shift, 0.1, dtype)
    assert again[0] is found[0] and torch.equal(again[1], found[1])
    wanted = torch.autograd.grad([normal, z], exact, [grad.double(), residual.double()])
    given = grad, found[0], *found[2:], scale
    of_x, of_branch, *others = layer_kernels.norm_backward(*given, residual, dtype, mask, factor)
    for ours, theirs in zip((of_x, of_branch, *others), wanted, strict=True):
        near(ours, theirs)
    alone = layer_kernels.norm_backward(*given, None, None, None, 1.0)
    near(alone[0] + residual, wanted[0])
    assert alone[1] is None


@pytest.mark.parametrize(
    ("classes", "dtype"), [(1, FULL), (2, FULL), (300, FULL), (10, FP16), (10, BF16)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy(smoothing, classes, dtype):
    logits, own, other, drawn = batch(4, classes, dtype)
    for lam in (LAMS["sample"], LAMS["one number"]):
        exact = logits.detach().double().requires_grad_()
        wanted = mixed_cross_entropy(exact, own, other, lam(drawn).double(), smoothing)
        (gradient,) = torch.autograd.grad(wanted.sum(), exact)
        weights = lam(drawn).expand_as(own)
        ours = layer_kernels.mixed_cross_entropy(logits.detach(), own, other, weights, smoothing)
        near(ours[0], wanted.detach())
        near(ours[1], gradient)


def test_an_invalid_target_gives_nan():
    logits, own, other, lam = batch()
    own[2], other[4] = 5, -1
    losses, _ = layer_kernels.mixed_cross_entropy(logits.detach(), own, other, lam, 0.0)
    assert losses.isnan().nonzero().flatten().tolist() == [2, 4]


# ---- blocks, networks and losses with kernels ---------------------------------------------------


def check(plain, fused, x, direction, allowed=2e-6) -> None:
    """Output, gradients and running statistics equal those of the plain model in float64."""
    exact = copy.deepcopy(plain).double()
    wanted = found(exact, x.double() if x.is_floating_point() else x, direction.double())
    got = found(fused, x, direction)
    assert got.keys() == wanted.keys()
    both = {n: (got[n].double(), t.double()) for n, t in wanted.items() if t is not None}
    errors = {n: float((ours - t).norm() / (t.norm() + 1)) for n, (ours, t) in both.items()}
    # A bias before BatchNorm has no effect: its gradient is only rounding error.
    errors = {n: e / 50 if "conv" in n and "bias" in n else e for n, e in errors.items()}
    assert max(errors.values()) < allowed, errors


@pytest.mark.parametrize(
    ("mode", "case"),
    [("memory", case) for case in CASES if case not in ("rectangle", "groups", "bias")]
    + [("speed", "drop-path"), ("speed", "shortcut with a convolution")],
)
def test_a_block(case, mode):
    """With drop-path in evaluation, too, which uses the running statistics."""
    for training in (True, False) if "drop-path" in case else (True,):
        made = blocks(mode, torch.float32, **CASES[case])
        last = torch.channels_last
        plain, fused = (model.to(memory_format=last).train(training) for model in made)
        x = torch.randn(3, 4, 6, 6).to(memory_format=last)
        direction = torch.randn_like(plain(x).detach())
        fused(x)
        check(plain, fused, x, direction)


@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_a_network(mode, monkeypatch):
    models = networks(18, mode=mode)
    calls = []
    for name in ("affine", "batch_values", "gradient_sums", "input_gradient"):
        kernel = getattr(image_kernels, name)
        counted = lambda *a, n=name, k=kernel, **o: (calls.append(n), k(*a, **o))[1]  # noqa: E731
        monkeypatch.setattr(image_kernels, name, counted)
    check(*models, pictures(4, 8), DIRECTION[:4], allowed=1e-4)
    count = {name: calls.count(name) for name in calls}
    assert count["batch_values"] == count["gradient_sums"] == count["input_gradient"] == 20
    assert count["affine"] == (17 if mode == "speed" else 17 + 17)


@pytest.mark.parametrize("name", ["input", "convolution", "texts"])
def test_bf16_is_as_close_to_float64_as_without_kernels(name, monkeypatch):
    if name == "texts":
        (plain, fused), x, direction = transformers(0.0), IDS[1:3, :8], OF_TEXTS[:2]
    else:
        made, last = blocks("memory", FULL, shortcut=name), torch.channels_last
        plain, fused = (model.to(memory_format=last) for model in made)
        x = torch.randn(16, 4, 9, 9).to(memory_format=last)
        direction = torch.randn_like(plain(x).detach())
        fused(x)
    exact = copy.deepcopy(plain).double()
    wanted = found(exact, x.double() if x.is_floating_point() else x, direction.double())
    errors, before = [], copy.deepcopy(fused.state_dict())
    for devices in (("cpu",), ()):
        monkeypatch.setattr(kernels, "DEVICES", devices)
        fused.load_state_dict(before)
        with torch.autocast("cpu", torch.bfloat16):
            got = found(fused, x, direction)
        of = [n for n, t in wanted.items() if t is not None and n != "grad/conv2.bias"]  # see above
        both = [(got[n].double(), wanted[n].double()) for n in of]
        errors.append(float(sum((ours - t).norm() / (t.norm() + 1) for ours, t in both)))
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize(("rate", "mode"), [(0.3, "memory"), (0.0, "speed")])
def test_a_transformer(rate, mode):
    plain, fused = transformers(rate, mode)
    check(plain, fused, IDS[1:3, :8], OF_TEXTS[:2])


def test_the_loss():
    logits, own, other, lam = batch()
    results = []
    for losses in (mixed_cross_entropy, fused_cross_entropy):
        loss = losses(logits, own, other, lam[0], 0.1)
        results.append((loss, *torch.autograd.grad((loss * torch.arange(7.0)).sum(), logits)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_the_comparison_that_users_make():
    """That of --check, here with the kernels."""
    differences = largest_differences(torch.device("cpu"))
    assert max(differences.values()) < 0.1 * ALLOWED, differences
