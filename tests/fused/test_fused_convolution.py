"""Fused residual blocks against the plain ones, and the memory that they save."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fused_tools import assert_close, found, pair
from launches import Launches
from torch import nn
from torch.func import functional_call

from benchmarks.fused import bytes_kept
from utils.fused import convolution, fuse
from utils.fused.convolution import Chain, Scratch, fused_block
from utils.models.resnet import BasicBlock, Bottleneck, DropPath, ResNet, SlicedConv1x1
from utils.optim.factory import build_optimizer

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # for float64; CPU kernels may round differently
CHANNELS_LAST = torch.channels_last
MODES = ("memory", "speed")
DIRECTION = torch.randn(6, 5, generator=torch.Generator().manual_seed(9))


class Block(nn.Module):
    """A residual block with drop-path, plain or fused; the branch has one or two convolutions."""

    def __init__(self, conv=None, norm=None, shortcut=None, rate=0.0, depth=2):
        super().__init__()
        conv, norm = conv or {}, norm or {}
        first = {"kernel_size": 3, "padding": 1, "bias": False} | conv
        self.conv1 = nn.Conv2d(4, 6, **first)
        self.bn1 = nn.BatchNorm2d(6, **norm)
        self.depth, self.shortcut = depth, shortcut
        if depth == 2:
            self.conv2 = nn.Conv2d(6, 4, 1, bias=True)
            self.bn2 = nn.BatchNorm2d(4, **norm)
        if shortcut == "convolution":
            stride = first.get("stride", 1)
            kind = SlicedConv1x1 if stride == 2 else nn.Conv2d  # as in ResNet
            self.side = nn.Sequential(
                kind(4, 4, 1, stride=stride, bias=False), nn.BatchNorm2d(4, **norm)
            )
        self.drop = DropPath(rate)
        self.fused = "none"

    def forward(self, x):
        side = {"convolution": getattr(self, "side", None)}.get(self.shortcut, self.shortcut)
        units = [(self.conv1, self.bn1)]
        if self.depth == 2:
            units.append((self.conv2, self.bn2))
        if self.fused != "none":
            return fused_block(x, units, side, self.drop, mode=self.fused)
        y = x
        for index, (conv, norm) in enumerate(units):
            y = norm(conv(F.relu(y) if index else y))
        y = self.drop(y)
        if side is not None:
            y = y + (x if side == "input" else side(x))
        return F.relu(y)


def blocks(mode, dtype=torch.float64, **options):
    torch.manual_seed(3)
    plain = Block(**options).to(dtype)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    fused = copy.deepcopy(plain)
    fused.fused = mode
    return plain, fused


CASES = {
    "alone": {"depth": 1},
    "branch": {},
    "input": {"shortcut": "input"},
    "shortcut with a convolution": {"shortcut": "convolution"},
    "stride": {"shortcut": "convolution", "conv": {"stride": 2}},
    "stride, dilation": {"conv": {"stride": 2, "padding": (1, 2), "dilation": (1, 2)}},
    "groups": {"conv": {"groups": 2}, "shortcut": "input"},
    "bias": {"conv": {"bias": True}},
    "rectangle": {"conv": {"kernel_size": (1, 3), "padding": (0, 1)}, "shortcut": "input"},
    "no affine": {"norm": {"affine": False}, "shortcut": "input"},
    "no running statistics": {"norm": {"track_running_stats": False}},
    "mean of all batches": {"norm": {"momentum": None}},
    "eps and momentum": {"norm": {"momentum": 0.3, "eps": 1e-2}},
    "drop-path": {"shortcut": "input", "rate": 0.4},
    "drop-path and convolution": {"shortcut": "convolution", "rate": 0.4},
}


def check_gradients(case, training, mode, elementwise=False) -> None:
    """Compares with finite differences elementwise, or along a random direction."""
    _, fused = blocks(mode, **CASES[case])
    fused.train(training)
    x = torch.randn(3, 4, 5, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in fused.named_parameters()]

    def call(x, *weights):
        torch.manual_seed(0)
        return functional_call(fused, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *fused.parameters()), fast_mode=not elementwise)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_finite_differences(case, training, mode):
    check_gradients(case, training, mode)


@pytest.mark.slow
def test_each_element_of_the_gradients_equals_its_finite_difference():
    check_gradients("drop-path and convolution", True, "memory", elementwise=True)


@pytest.mark.parametrize("order", [torch.contiguous_format, CHANNELS_LAST], ids=["rows", "last"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_block_equals_the_plain_one(case, mode, training, order):
    made = blocks(mode, **CASES[case])
    plain, fused = (model.to(memory_format=order).train(training) for model in made)
    for step in range(2):
        x = torch.randn(5, 4, 6, 6, dtype=torch.float64).to(memory_format=order)
        direction = torch.randn_like(plain(x).detach())
        fused(x)
        assert_close(found(plain, x, direction, step), found(fused, x, direction, step), **EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_parts_that_need_no_gradient(mode):
    for frozen in (["conv1"], ["conv1", "bn1"], ["bn2"], ["conv2", "bn2"], ["side"]):
        plain, fused = blocks(mode, shortcut="convolution")
        x = torch.randn(5, 4, 6, 6, dtype=torch.float64)
        for model in (plain, fused):
            for name in frozen:
                model.get_submodule(name).requires_grad_(False)
            model(x).square().sum().backward()
        for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


# ---- the whole network --------------------------------------------------------------------------


def networks(depth=50, width=4, order=CHANNELS_LAST, mode="memory", **options):
    torch.manual_seed(0)
    return pair(ResNet(depth, 5, width, **options).to(memory_format=order), mode)


def pictures(n=6, size=16, order=CHANNELS_LAST, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, size, size, generator=generator).to(memory_format=order)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"depth": 18}, {}, {"order": torch.contiguous_format}, {"stem": "imagenet"},
     {"drop_path": 0.5}, {"zero_init_residual": True}, {"mode": "speed"},
     {"mode": "speed", "depth": 18, "stem": "imagenet", "drop_path": 0.5}],
    ids=str,
)  # fmt: skip
def test_a_network_equals_the_plain_one_to_the_bit(options, autocast):
    order = options.get("order", CHANNELS_LAST)
    results = []
    size = 64 if options.get("stem") == "imagenet" else 16
    for model in networks(**options):
        torch.manual_seed(1)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            model(pictures(size=size, order=order))  # updates the running statistics
            results.append(found(model, pictures(size=size, order=order), DIRECTION))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_cast_once_in_a_pass(mode):
    """All together, and their gradients by blocks, whichever weights the pass finds: of an average
    in their place, of a frozen stage, of a convolution that is exchanged."""
    results = []
    for model in networks(18, mode=mode):
        fused = getattr(model, "fused", "none") != "none"
        results.append({})
        for number, change in enumerate((
            lambda m: None,
            lambda m: [setattr(p, "data", p.data * 0.9) for p in m.parameters()],
            lambda m: m.layer2.requires_grad_(False),
            lambda m: setattr(m.layer3[0], "conv1", copy.deepcopy(m.layer3[0].conv1)),
        )):  # fmt: skip
            change(model)
            with torch.autocast("cpu", torch.bfloat16), Launches() as launches:
                seen = found(model, pictures(seed=number), DIRECTION)
            results[-1] |= {f"{number}/{name}": t for name, t in seen.items() if t is not None}
            if fused:
                frozen = 2 if number >= 2 else 0  # blocks
                assert launches.counts["_foreach_copy_"] == 1 + 8 + 1 - frozen
    plain, ours = results
    assert plain.keys() == ours.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, ours[name]), name


def test_bf16_is_as_close_to_float64_as_the_plain_one():
    plain, fused = networks(18)
    exact = copy.deepcopy(plain).double()
    wanted = found(exact, pictures().double(), DIRECTION.double())
    wanted = {name: tensor for name, tensor in wanted.items() if tensor.is_floating_point()}
    errors = []
    for model in (plain, fused):
        with torch.autocast("cpu", torch.bfloat16):
            got = found(model, pictures(), DIRECTION)
        errors.append(sum((got[n].double() - t).norm() / (t.norm() + 1) for n, t in wanted.items()))
    assert errors[1] <= errors[0] * 1.0001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        ("sgd", "speed"),
        pytest.param("sgd", "memory", marks=pytest.mark.slow),
        pytest.param("ngd", "memory", marks=pytest.mark.slow),
        pytest.param("ngd", "speed", marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_with_accumulation_equal_the_plain_ones(optimizer, mode):
    models = [model.double() for model in networks(18, mode=mode)]
    for model in models:
        steps = build_optimizer(optimizer, model, lr=0.01, weight_decay=1e-3)
        for step in range(50):
            for half in range(2):
                x = pictures(4, seed=2 * step + half).double()
                F.cross_entropy(model(x), torch.arange(4)).backward()
            steps.step()
            steps.zero_grad()
    plain, fused = models
    assert_close(plain.state_dict(), fused.state_dict(), **EXACT)
    plain.eval(), fused.eval()
    torch.testing.assert_close(fused(pictures().double()), plain(pictures().double()), **EXACT)
    plain.load_state_dict(fused.state_dict())


def per_picture(model, autocast=True):
    def call(n):
        def run(model):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return model(pictures(n, 32))

        return run

    return (bytes_kept(model, call(3)) - bytes_kept(model, call(1))) / 2


def test_memory_saves_only_the_convolutions_outputs():
    plain, memory = networks(50, 64)
    assert 12.6e6 < per_picture(plain) < 12.9e6
    assert per_picture(memory) <= 6.9e6


def test_speed_saves_no_more_than_the_plain_modules():
    for options in ({}, {"drop_path": 0.5}, {"depth": 18}):
        plain, speed = networks(mode="speed", **options)
        assert per_picture(speed) <= per_picture(plain)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_changed_by_hooks_are_used(mode):
    for hook in (lambda m, i, y: y * 1.5, lambda m, i, y: y.clone()):
        results = []
        for model in networks(18, mode=mode):
            model.double().layer1[0].register_forward_hook(hook)
            results.append(found(model, pictures().double(), DIRECTION.double()))
        assert_close(*results, **EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_repeated_and_partial_backward_passes(mode):
    results = []
    for model in networks(18, mode=mode):
        seen = []
        model.layer2.register_forward_hook(lambda m, i, y, seen=seen: seen.append(y))
        x = pictures().requires_grad_()
        y = model(x)
        first = torch.autograd.grad(y.sum(), seen[0], retain_graph=True)
        second = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        third = torch.autograd.grad(seen[0].sum(), x, retain_graph=True)
        fourth = torch.autograd.grad(y.square().sum(), x)
        results.append(dict(enumerate(first + second + third + fourth)))
    assert_close(*results, rtol=0, atol=0)


def test_a_product_adds_the_gradient_of_the_shortcut(monkeypatch):
    """As on a GPU in half precision, for every convolution of 1 x 1 that begins a block or is a
    shortcut without stride."""
    plain = ResNet(50, 5, 8).to(memory_format=CHANNELS_LAST)
    exact, fused = copy.deepcopy(plain).double(), fuse(copy.deepcopy(plain), "speed")
    x, added = torch.randn(6, 3, 8, 8), []

    def gradients(model, x, dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = found(model, x.to(dtype=dtype), DIRECTION.to(dtype))
        return {name: tensor.double() for name, tensor in result.items() if "buffer" not in name}

    def distance(one) -> float:
        return sum((one[n] - t).norm() / t.norm() for n, t in wanted.items()).item()

    wanted = gradients(exact, x.double(), torch.float64)
    without = distance(gradients(fused, x, torch.bfloat16))
    product = torch.Tensor.addmm_
    monkeypatch.setattr(convolution, "PRODUCTS_ON", ("cpu",))
    monkeypatch.setattr(Scratch, "like", lambda self, tensor, name: torch.empty_like(tensor))
    monkeypatch.setattr(
        torch.Tensor, "addmm_", lambda into, *factors: added.append(into) or product(into, *factors)
    )
    assert distance(gradients(fused, x, torch.bfloat16)) < 1.2 * without
    assert len(added) == 12 + 1  # blocks that add their input; one shortcut


def test_without_gradients_or_with_other_weights_it_is_plain():
    model = networks(18)[1]
    x = pictures()
    with torch.no_grad():
        assert model(x).grad_fn is None
    tensors = {name: t.detach().requires_grad_() for name, t in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    y = functional_call(model, tensors | buffers, (x,))
    (gradient,) = torch.autograd.grad(y.sum(), tensors["conv1.weight"], create_graph=True)
    gradient.sum().backward()  # twice differentiable
    loss = model(x).square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, model.conv1.weight, create_graph=True)


def test_fuse_chooses_the_modules():
    model = networks(18)[1]
    fused = [m for m in model.modules() if getattr(m, "fused", "none") == "memory"]
    assert sum(isinstance(m, (BasicBlock, Bottleneck)) for m in fused) == 8
    assert not any(getattr(m, "fused", "none") != "none" for m in fuse(model, "none").modules())
    with pytest.raises(ValueError, match="one of"):
        fuse(model, "fast")
    with pytest.raises(ValueError, match="can be fused"):
        fuse(nn.Linear(1, 1), "memory")


def test_a_batch_of_one_value_is_refused():
    _, fused = blocks("memory", conv={"kernel_size": 1, "padding": 0})
    with pytest.raises(ValueError, match="more than 1 value"):
        fused(torch.randn(1, 4, 1, 1, dtype=torch.float64))


def test_chain_recognizes_only_its_last_output():
    chain, y = Chain(), torch.randn(2, 3, requires_grad=True) * 2
    assert chain.producer(y) is None
    chain.record(y)
    assert chain.producer(y.view_as(y)) is y.grad_fn
    assert chain.producer(y.clone()) is None and chain.producer(y[:1]) is None
    with torch.no_grad():
        y.add_(1)
    assert chain.producer(y) is None
