"""ResNet has torchvision's keys and, with the same weights, its results."""

import functools

import pytest
import torch
import torchvision

from utils.models.resnet import STAGES, BasicBlock, Bottleneck, DropPath, ResNet


def torchvision_resnet(depth: int, **settings):
    return getattr(torchvision.models, f"resnet{depth}")(weights=None, **settings)


@pytest.mark.parametrize("depth", STAGES)
def test_state_dict_is_torchvisions(depth):
    with torch.device("meta"):  # only shapes
        ours = ResNet(depth, 1000, stem="imagenet").state_dict()
        theirs = torchvision_resnet(depth).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {
        key: value.shape for key, value in theirs.items()
    }
    assert list(ours) == list(theirs)


@functools.cache
def random_pair(depth: int):
    """Ours and torchvision's in float64 with the same random weights, scales and statistics."""
    torch.manual_seed(0)
    theirs = torchvision_resnet(depth, num_classes=7).double()
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.1)
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    ours = ResNet(depth, 7, stem="imagenet").double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("depth", [18, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_outputs_gradients_and_statistics_are_torchvisions(depth, training):
    ours, theirs = random_pair(depth)
    images = torch.randn(3, 3, 40, 33, dtype=torch.float64)
    weights = torch.randn(3, 7, dtype=torch.float64)
    outputs, gradients = [], []
    for model in (ours, theirs):
        model.zero_grad()
        inputs = images.clone().requires_grad_()
        logits = model.train(training)(inputs)
        (logits * weights).sum().backward()
        outputs.append(logits.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        gradients[-1]["inputs"] = inputs.grad
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(outputs[0], outputs[1], **close)
    torch.testing.assert_close(gradients[0], gradients[1], **close)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), **close)


@pytest.mark.parametrize(
    ("depth", "stem", "size", "side", "channels"),
    [
        (18, "cifar", 32, 4, 64),
        (50, "cifar", 32, 4, 256),
        (18, "imagenet", 64, 2, 64),
        (34, "cifar", 9, 2, 64),
    ],
)
def test_shapes_of_the_last_stage(depth, stem, size, side, channels):
    model = ResNet(depth, 5, width=8, stem=stem).eval()
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with torch.inference_mode():
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 5)
    assert seen == [(2, channels, side, side)]


def test_cifar_stem_differs_in_the_first_layers_only():
    with torch.device("meta"):
        shapes = [
            {key: value.shape for key, value in ResNet(18, 5, stem=stem).state_dict().items()}
            for stem in ("cifar", "imagenet")
        ]
    assert shapes[0].pop("conv1.weight") == (64, 3, 3, 3)
    assert shapes[1].pop("conv1.weight") == (64, 3, 7, 7)
    assert shapes[0] == shapes[1]


def test_a_seed_determines_the_weights():
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(ResNet(18, 4, width=4).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("wrong", [{"depth": 20}, {"stem": "mnist"}])
def test_a_wrong_depth_or_stem_is_refused(wrong):
    with pytest.raises(ValueError, match="is one of"):
        ResNet(**wrong)


def blocks_of(model):
    return [module for module in model.modules() if isinstance(module, (BasicBlock, Bottleneck))]


def test_only_the_head_depends_on_the_classes():
    with torch.device("meta"):
        few, many = (ResNet(18, classes).state_dict() for classes in (2, 9))
    different = {key for key in few if few[key].shape != many[key].shape}
    assert different == {f"{ResNet.HEAD}.weight", f"{ResNet.HEAD}.bias"}


# ---- pictures of other channels ---------------------------------------------------------------


@pytest.mark.parametrize(("stem", "side"), [("cifar", 4), ("imagenet", 1)])
@pytest.mark.parametrize("depth", [18, 50])
def test_grey_pictures_of_28_pixels(depth, stem, side):
    model = ResNet(depth, 10, width=4, stem=stem, channels=1)
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(torch.randn(2, 1, 28, 28)).sum().backward()
    assert seen[0][2:] == (side, side)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_one_channel_is_three_with_the_weights_summed(stem):
    torch.manual_seed(0)
    colour = ResNet(18, 5, width=4, stem=stem).double().eval()
    grey = ResNet(18, 5, width=4, stem=stem, channels=1).double().eval()
    state = colour.state_dict()
    grey.load_state_dict(state | {"conv1.weight": state["conv1.weight"].sum(1, keepdim=True)})
    images = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(grey(images), colour(images.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_gradients_of_one_channel_do_not_depend_on_the_memory_order(stem):
    """oneDNN has gone wrong with few channels in channels_last order (SlicedConv1x1)."""
    images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    gradients = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = ResNet(18, 5, width=16, stem=stem, channels=1).to(memory_format=order)
        model.eval()  # BatchNorm over a last stage of few pixels would magnify the rounding
        model(images.to(memory_format=order))[:, 0].sum().backward()
        gradients.append(model.conv1.weight.grad)
    scale = gradients[0].abs().max().item()
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5 * scale)


# ---- zero_init_residual -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [18, 50])
def test_zero_init_blocks_start_as_their_shortcuts(depth):
    torch.manual_seed(0)
    model = ResNet(depth, 5, width=4, zero_init_residual=True).train()
    for block in blocks_of(model):
        shortcut = block.downsample or torch.nn.Identity()
        x = torch.randn(3, block.conv1.in_channels, 8, 8)
        torch.testing.assert_close(block(x), torch.relu(shortcut(x)), rtol=0, atol=0)
    # Only these weights are 0, and they can learn: their gradient is not 0.
    model(torch.randn(4, 3, 16, 16))[:, 0].sum().backward()
    zero = [name for name, p in model.named_parameters() if p.ndim == 1 and not p.any()]
    last = "bn2.weight" if depth == 18 else "bn3.weight"
    zero = [name for name in zero if name.endswith("weight")]
    assert len(zero) == sum(STAGES[depth]) and all(name.endswith(last) for name in zero)
    assert all(model.get_parameter(name).grad.any() for name in zero)


@pytest.mark.parametrize("depth", [18, 50])
def test_zero_init_is_torchvisions_and_changes_nothing_else(depth):
    states = []
    for zero in (False, True):
        torch.manual_seed(3)
        states.append(ResNet(depth, 4, width=4, zero_init_residual=zero).state_dict())
    changed = {key for key in states[0] if not torch.equal(states[0][key], states[1][key])}
    theirs = torchvision_resnet(depth, zero_init_residual=True).state_dict()
    norms = {key for key in theirs if ".bn" in key and key.endswith("weight")}
    assert changed == {key for key in norms if not theirs[key].any()}


# ---- drop_path --------------------------------------------------------------------------------


def test_drop_path_keeps_or_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.rand(20_000, 3, 2, 2) + 1
    y = drop(x)
    kept = y.flatten(1).any(1)
    assert torch.equal(y[~kept], torch.zeros_like(y[~kept]))
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    # Standard errors: 0.003 of the share kept, and 0.4 % of the mean.
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.015)
    assert y.mean().item() == pytest.approx(x.mean().item(), rel=0.02)
    assert not torch.equal(y, drop(x))
    assert drop.eval()(x) is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drop_path_scales_without_a_bias_in_half_precision(dtype):
    """1 / 0.9 rounded to bf16 would be 0.16 % too small for every sample."""
    torch.manual_seed(0)
    x = torch.rand(4000, 16, 1, 1) + 1
    y = DropPath(0.1)(x.to(dtype))
    assert y.dtype == dtype
    kept = y.flatten(1).any(1)
    ratio = y[kept].double().sum() / x[kept].to(dtype).double().sum()
    assert ratio.item() == pytest.approx(1 / 0.9, rel=1e-4)


def test_drop_path_of_the_gradient():
    torch.manual_seed(0)
    x = torch.randn(64, 2, 1, 1, requires_grad=True)
    y = DropPath(0.5)(x)
    y.sum().backward()
    kept = y.detach().flatten(1).any(1)
    assert 0 < kept.sum() < 64
    assert torch.equal(x.grad, (kept * 2.0)[:, None, None, None].expand_as(x))


@pytest.mark.parametrize("depth", [18, 50])
def test_the_rate_rises_linearly_over_the_blocks(depth):
    blocks = blocks_of(ResNet(depth, 4, width=4, drop_path=0.3))
    rates = [getattr(block.drop_path, "rate", 0.0) for block in blocks]
    assert len(rates) == sum(STAGES[depth])
    assert rates == pytest.approx(torch.linspace(0, 0.3, len(rates)).tolist(), abs=1e-6)
    assert rates[0] == 0 and isinstance(blocks[0].drop_path, torch.nn.Identity)


def test_a_dropped_block_is_its_shortcut():
    torch.manual_seed(0)
    block = blocks_of(ResNet(18, 4, width=4, drop_path=0.5))[-1].train()
    x = torch.randn(64, block.conv1.in_channels, 4, 4)
    skipped = (block(x) == torch.relu(x)).flatten(1).all(1)
    assert 16 < skipped.sum() < 48  # half of 64, four standard deviations to either side


def test_drop_path_only_in_training():
    torch.manual_seed(0)
    plain, dropping = ResNet(18, 4, width=4), ResNet(18, 4, width=4, drop_path=0.5)
    dropping.load_state_dict(plain.state_dict())
    assert list(dropping.state_dict()) == list(plain.state_dict())
    x = torch.randn(8, 3, 16, 16)
    assert not torch.equal(plain(x), dropping(x))
    dropping.load_state_dict(plain.state_dict())  # both have the same running statistics again
    state = torch.get_rng_state()
    assert torch.equal(plain.eval()(x), dropping.eval()(x))
    assert torch.equal(state, torch.get_rng_state())


def test_without_drop_path_no_random_number_is_drawn():
    model = ResNet(18, 4, width=4).train()
    x = torch.randn(4, 3, 16, 16)
    state = torch.get_rng_state()
    model(x).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    assert not any(isinstance(module, DropPath) for module in model.modules())


def test_drop_path_and_zero_init_do_not_change_the_other_initial_weights():
    states = []
    for settings in ({}, {"drop_path": 0.2, "channels": 3}):
        torch.manual_seed(3)
        states.append(ResNet(50, 4, width=4, **settings).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("wrong", [-0.1, 1.0])
def test_a_wrong_drop_path_is_refused(wrong):
    with pytest.raises(ValueError, match="drop_path lies between 0 and below 1"):
        ResNet(18, drop_path=wrong)
