"""BatchNorm over ranks against PyTorch's on the whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from utils.distributed.sync_batch_norm import OverRanks, alone, sync_batch_norms
from utils.errors import UserError
from utils.exchange import Exchange
from utils.models.resnet import ResNet

# Samples of each rank.
SHARES = ((6,), (3, 3), (5, 1), (0, 4), (2, 1, 4, 1), (0, 3, 0, 1))


class Alone(Exchange):
    """An exchange of one rank that counts as two."""

    size = 2


def synced(norm: nn.Module, exchange: Exchange | None = None) -> nn.Module:
    sync_batch_norms(norm, exchange or Alone())
    return norm


def network(momentum=0.1, affine=True, track=True):
    torch.manual_seed(0)
    options = {"momentum": momentum, "affine": affine, "track_running_stats": track}
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5, **options), nn.ReLU(),
        nn.Conv2d(5, 4, 3, padding=1), nn.BatchNorm2d(4, eps=1e-3, **options),
    )  # fmt: skip


def batches(n, dtype, steps=3, shift=0.0):
    torch.manual_seed(1)
    inputs = torch.randn(steps, n, 3, 4, 4, dtype=dtype) + shift
    return inputs, torch.randn(steps, n, 4, 4, 4, dtype=dtype)


def passes(model, inputs, directions) -> dict:
    """Outputs and gradients of some training passes and one in evaluation mode."""
    found = {}
    for step, (x, direction) in enumerate(zip(inputs, directions, strict=True)):
        x = x.clone().requires_grad_()
        y = model(x)
        (y * direction).sum().backward()
        found |= {f"{step}/y": y.detach(), f"{step}/x": x.grad}
    found |= {f"grad/{n}": p.grad for n, p in model.named_parameters()}
    found |= {f"state/{n}": tensor for n, tensor in model.state_dict().items()}
    found["eval"] = model.eval()(inputs[0]).detach()
    return found


def of_rank(exchange, shares, dtype, options, shift) -> dict:
    inputs, directions = batches(sum(shares), dtype, shift=shift)
    end = sum(shares[: exchange.rank + 1])
    own = slice(end - shares[exchange.rank], end)
    model = network(**options).to(dtype)
    kept = list(model.parameters()), list(model.buffers()), list(model.state_dict())
    sync_batch_norms(model, exchange)
    assert list(model.state_dict()) == kept[2]
    assert all(map(lambda a, b: a is b, model.parameters(), kept[0]))
    assert all(map(lambda a, b: a is b, model.buffers(), kept[1]))
    assert isinstance(model[1], OverRanks) == (exchange.size > 1)
    found = passes(model, inputs[:, own], directions[:, own])
    for name in found:
        if name.startswith("grad/"):
            found[name] = exchange.sum(found[name])
    return found


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track": False}],
    ids=str,
)
def test_it_equals_batch_norm_of_the_whole_batch(worlds, shares, options):
    check(worlds, shares, torch.float64, options, 0.0, 1e-10)


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize("shares", ((3, 3), (2, 1, 4, 1)), ids=str)
def test_in_float32(worlds, shares, shift):
    """Also of values far from 0, where a mean of squares would have no digit of the variance."""
    check(worlds, shares, torch.float32, {}, shift, 1e-4 if not shift else 5e-3)


def check(worlds, shares, dtype, options, shift, tolerance):
    inputs, directions = batches(sum(shares), dtype, shift=shift)
    expected = passes(network(**options).to(dtype), inputs, directions)
    parts = worlds(len(shares)).run(of_rank, shares, dtype, options, shift)
    for name, value in expected.items():
        if name[0].isdigit() or (name == "eval" and options.get("track", True)):
            found = torch.cat([part[name] for part in parts])
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)
        elif name != "eval":  # which without running statistics takes those of its own samples
            for part in parts:
                torch.testing.assert_close(part[name], value, rtol=tolerance, atol=tolerance)
                assert torch.equal(part[name], parts[0][name])


def in_half(exchange, channels_last: bool):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6, 6)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    size = 4 // exchange.size
    x = x[exchange.rank * size :][:size].bfloat16().requires_grad_()
    norm = synced(nn.BatchNorm2d(5), exchange)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    (of_x,) = torch.autograd.grad(y.float().square().sum() / 2 + y.float().pow(3).sum(), x)
    assert y.dtype == of_x.dtype == torch.bfloat16 and norm.running_var.dtype == torch.float32
    assert all(
        tensor.is_contiguous(memory_format=torch.channels_last) == channels_last
        for tensor in (y, of_x)
    )
    return y.detach().float(), of_x.float()


@pytest.mark.parametrize("channels_last", [False, True])
def test_bf16_and_memory_formats(worlds, channels_last):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6, 6).bfloat16().float().requires_grad_()
    y = nn.BatchNorm2d(5)(x)
    (of_x,) = torch.autograd.grad(y.square().sum() / 2 + y.pow(3).sum(), x)
    for size in (1, 2, 4):
        parts = worlds(size).run(in_half, channels_last)
        for found, expected in zip(zip(*parts, strict=True), (y, of_x), strict=True):
            torch.testing.assert_close(torch.cat(found), expected.detach(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("affine", [False, True])
def test_the_gradient_equals_finite_differences(affine):
    torch.manual_seed(0)
    norm = synced(nn.BatchNorm2d(3, affine=affine, track_running_stats=False).double())
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weights = tuple(torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(x, *weights):
        return functional_call(norm, dict(zip(("weight", "bias"), weights, strict=False)), (x,))

    assert torch.autograd.gradcheck(call, (x, *weights) if affine else (x,))


def test_it_keeps_the_input_and_little_else_for_the_backward_pass():
    kept = []
    norm, x = synced(nn.BatchNorm2d(3)), torch.randn(4, 3, 2, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    # The number of values, and of each channel mean, scale and weight.
    assert sorted(tensor.numel() for tensor in kept) == [1, 3, 3, 3, x.numel()]


def test_a_second_derivative_is_refused():
    norm, x = synced(nn.BatchNorm2d(3)), torch.randn(4, 3, 2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)


def test_what_is_refused_and_what_stays():
    class Unknown(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) + 1

    refused = nn.Sequential(nn.BatchNorm2d(3), Unknown(3))
    with pytest.raises(UserError, match="--sync_bn: the model's Unknown is not PyTorch's"):
        sync_batch_norms(refused, Alone())
    assert type(refused[0]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="two values"):
        synced(nn.BatchNorm2d(3))(torch.randn(1, 3, 1, 1))
    model = network()
    before = repr(model)
    sync_batch_norms(model, Exchange())
    assert repr(model) == before
    model[1].eval()
    sync_batch_norms(model, Alone())
    assert not model[1].training and model[4].training
    copied = copy.deepcopy(model)
    assert isinstance(copied[1], OverRanks) and copied[1].weight is not model[1].weight


def test_alone_nothing_is_exchanged():
    class Silent(Alone):
        def gather(self, tensor):
            raise AssertionError("a collective")

    torch.manual_seed(0)
    x, plain = torch.randn(4, 3, 4, 4), network()
    model = synced(network(), Silent())
    with alone(model):
        torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(AssertionError, match="a collective"):
        model(x)


SHAPES = {nn.BatchNorm1d: (5,), nn.BatchNorm3d: (5, 2, 3, 2), "1d": (5, 6)}


def other_dimensions(exchange, kind):
    torch.manual_seed(0)
    x = torch.randn(4, *SHAPES[kind], dtype=torch.float64)
    norm = synced((nn.BatchNorm1d if kind == "1d" else kind)(5).double(), exchange)
    size = 4 // exchange.size
    x = x[exchange.rank * size :][:size].requires_grad_()
    y = norm(x)
    (of_x,) = torch.autograd.grad(y.pow(3).sum(), x)
    return y.detach(), of_x, norm.running_var


@pytest.mark.parametrize("kind", SHAPES, ids=str)
def test_other_dimensions(worlds, kind):
    """Vectors, sequences and volumes."""
    y, of_x, var = other_dimensions(Exchange(), kind)
    for size in (2, 4):
        parts = worlds(size).run(other_dimensions, kind)
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), y)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), of_x)
        torch.testing.assert_close(parts[0][2], var)


def activated(exchange):
    from timm.layers import BatchNormAct2d

    torch.manual_seed(0)
    x = torch.randn(4, 5, 3, 3, dtype=torch.float64)
    norm = synced(BatchNormAct2d(5, act_layer=nn.SiLU).double(), exchange)
    size = 4 // exchange.size
    own = x[exchange.rank * size :][:size]
    return norm(own).detach(), norm.eval()(own).detach()


@pytest.mark.slow
def test_timms_activation_stays(worlds):
    """timm's BatchNormAct2d, of EfficientNets and others, has an activation of its own."""
    expected = activated(Exchange())
    parts = worlds(2).run(activated)
    for found, value in zip(zip(*parts, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found), value)


def elsewhere(exchange):
    """Gradients at other weights, with copies of the buffers, as in a virtual step."""
    torch.manual_seed(0)
    model = synced(ResNet(18, 3, width=4, stem="cifar").double(), exchange)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    size = 4 // exchange.size
    weights = {n: (1.1 * p.detach()).requires_grad_() for n, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = x[exchange.rank * size :][:size]
    logits = functional_call(model, weights | buffers, (own,))
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), list(weights.values()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert buffers["bn1.num_batches_tracked"] == 1
    return [exchange.sum(gradient) for gradient in gradients]


def test_a_functional_call_with_other_weights(worlds):
    expected = elsewhere(Exchange())
    for size in (2, 4):
        for found in worlds(size).run(elsewhere):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_two_values_of_a_channel_are_enough():
    x = torch.tensor([[1.0, -2.0], [4.0, 2.5]], dtype=torch.float64).view(2, 2, 1, 1)
    ours, theirs = synced(nn.BatchNorm2d(2)).double(), nn.BatchNorm2d(2).double()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-12, atol=1e-12)
