"""Fused modules with their Triton kernels on a GPU, against PyTorch's code there and in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.fused import fuse, kernels
from utils.fused.cross_entropy import fused_cross_entropy
from utils.machine.backends import float32_products
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.training.objective import mixed_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)
FORMATS = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
MODES = pytest.mark.parametrize("mode", ["memory", "speed"])


@pytest.fixture(autouse=True)
def exact_products():
    """Products in full float32, so that differences are the kernels' rounding."""
    with float32_products("float32"):
        yield


@pytest.fixture
def pytorch_alone(monkeypatch):
    """A function after whose call no kernel is used."""
    return lambda: monkeypatch.setattr(kernels, "DEVICES", ())


def keep_relus_off_zero(model, x) -> None:
    """Near 0 the last bit decides whether a ReLU is open, a larger difference than all of float32's
    rounding. So every second channel is open for all values and the others are closed, in both
    addends of a residual sum."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            with torch.no_grad():
                norm.bias.fill_(10.0)[1::2] = -10.0
    seen, tried = [], copy.deepcopy(model)
    for relu in tried.modules():
        if isinstance(relu, nn.ReLU):
            relu.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    tried(x)
    assert seen and all(((value.abs() > 0.1) | (value == 0)).all() for value in seen)


def case(name):
    """(model, input), in float32."""
    torch.manual_seed(0)
    if name == "texts":  # no dropout: in float64 it draws other numbers
        model = Transformer(50, 5, 2, 64, 4, 96, 20, dropout=0.0)
        return model.to(CUDA), torch.randint(1, 50, (16, 20)).to(CUDA)
    depth, rate = {"basic": (18, 0.0), "bottleneck": (50, 0.0), "drop-path": (18, 0.5)}[name]
    model = ResNet(depth, 5, 16, drop_path=rate).to(CUDA, memory_format=torch.channels_last)
    return model, torch.randn(16, 3, 32, 32).to(CUDA, memory_format=torch.channels_last)


def found(model, x, dtype) -> dict:
    """Logits, gradients and running statistics of a forward and backward pass."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        logits = model(x)
    loss = F.cross_entropy(logits.double(), torch.arange(len(logits), device=CUDA) % 5)
    loss.backward()
    result = {"logits": logits.detach()} | dict(model.named_buffers())
    result |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {n: t.double().clone() for n, t in result.items() if t is not None}


def distance(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return float(sum((one[n] - t).norm() / (t.norm() + 1e-3) for n, t in other.items()) / len(one))


def test_the_kernels_are_used():
    assert kernels.unusable() is None
    rows = torch.ones(2, 4, device=CUDA)
    assert kernels.images(rows[:, :, None, None]) and kernels.layers(rows)


@MODES
@FORMATS
@pytest.mark.parametrize("name", ["basic", "bottleneck", "texts"])
def test_a_model_is_no_farther_from_float64(name, dtype, mode, pytorch_alone):
    plain, x = case(name)
    if name != "texts" and dtype == torch.float32:
        keep_relus_off_zero(plain, x)
    exact = copy.deepcopy(plain).double()
    wanted = found(exact, x.double() if x.is_floating_point() else x, torch.float64)
    fused = fuse(copy.deepcopy(plain), mode)
    ours = distance(found(fused, x, dtype), wanted)
    theirs = distance(found(copy.deepcopy(plain), x, dtype), wanted)
    pytorch_alone()
    without = distance(found(fuse(copy.deepcopy(plain), mode), x, dtype), wanted)
    # Distances vary by chance, in float32 by that of few channels whose statistics are rounded
    # badly. A wrong kernel is off by a hundred times as much.
    limit = 3 if dtype == torch.float32 else 1.5
    assert ours <= limit * min(theirs, without) + 1e-6, (ours, theirs, without)


@MODES
def test_drop_path_draws_what_it_draws_without_kernels(mode, pytorch_alone):
    """If other samples were dropped, the distance would be near 1."""
    plain, x = case("drop-path")
    keep_relus_off_zero(plain, x)
    ours = found(fuse(copy.deepcopy(plain), mode), x, torch.float32)
    pytorch_alone()
    assert distance(ours, found(fuse(plain, mode), x, torch.float32)) < 1e-2


@MODES
def test_dropout_draws_what_it_draws_without_kernels(mode, pytorch_alone):
    torch.manual_seed(0)
    plain = Transformer(50, 5, 2, 64, 4, 96, 20, dropout=0.3, attention_dropout=0.0).to(CUDA)
    ids = torch.randint(1, 50, (16, 20)).to(CUDA)
    ours = found(fuse(copy.deepcopy(plain), mode), ids, torch.float32)
    pytorch_alone()
    assert distance(ours, found(fuse(plain, mode), ids, torch.float32)) < 1e-4


@pytest.mark.parametrize("shape", [(3, 5, 7, 11), (64, 64, 56, 56), (2, 2048, 7, 7)], ids=str)
@FORMATS
def test_batch_norm_of_any_size(shape, dtype):
    """With statistics far from zero, too; always with the same bits, whichever program of a sum
    ends last."""
    c, grad = (
        torch.randn(shape, device=CUDA).add_(shift).to(dtype, memory_format=torch.channels_last)
        for shift in (100, 0)
    )
    kernel = kernels.images(c)
    weight, bias = torch.randn(2, shape[1], device=CUDA)
    exact = [t.double().requires_grad_() for t in (c, weight, bias)]
    normal = F.batch_norm(exact[0], None, None, *exact[1:], training=True)

    def run():
        numbers = kernel.batch_values(c, weight, bias, 1e-5, None, None, 0.0)
        y = kernel.affine(c, *numbers[2:], True, out=torch.empty_like(c))
        sums = kernel.gradient_sums(grad, c, numbers, relu=True)
        of_c = torch.empty_like(c)
        kernel.input_gradient(grad, c, numbers, sums, relu=True, out=of_c)
        return y, of_c, sums[1], sums[0]

    ours = run()
    of_normal = grad.double() * (ours[0] > 0)  # near 0 its sign depends on the last bit
    wanted = [normal.relu(), *torch.autograd.grad(normal, exact, of_normal)]
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0.0}[dtype]
    for one, other in zip(ours, wanted, strict=True):
        assert (one.double() - other).norm() <= (step + 1e-4) * other.norm()
    for _ in range(50):
        assert all(torch.equal(one, other) for one, other in zip(ours, run(), strict=True))


@FORMATS
@pytest.mark.parametrize("classes", [2, 10, 1000, 9999])
def test_the_loss(classes, dtype):
    torch.manual_seed(0)
    logits = torch.randn(33, classes, device=CUDA).to(dtype).requires_grad_()
    own, other = torch.randint(0, classes, (2, 33), device=CUDA)
    lam, weights = torch.rand(2, 33, device=CUDA)
    results = []
    for loss, x in ((fused_cross_entropy, logits), (mixed_cross_entropy, logits.double())):
        losses = loss(x, own, other, lam.to(torch.float64 if x is not logits else lam.dtype), 0.1)
        (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
        results.append((losses.double(), gradient.double()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    # Rounded once, and again after the product with the weight.
    step = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=step, atol=1e-5)


@MODES
@pytest.mark.parametrize("name", ["basic", "texts"])
def test_no_host_waits(name, mode):
    model, x = case(name)
    fuse(model, mode)
    targets = torch.arange(len(x), device=CUDA) % 5
    for warm in (True, False):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x), targets)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
