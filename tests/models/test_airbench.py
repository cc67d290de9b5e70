"""The whitened stem, the network of --depth 8 that begins with it, and ResNets with it."""

import json

import pytest
import torch
from torch import nn

from utils.models.airbench import AirbenchNet
from utils.models.resnet import ResNet
from utils.models.whiten import EPSILON, WhitenedStem


def correlated_pictures(count: int = 300) -> torch.Tensor:
    """Smooth pictures whose channels are alike."""
    torch.manual_seed(0)
    noise = torch.randn(count, 3, 12, 12, dtype=torch.float64)
    alike = noise + 2 * noise.mean(1, keepdim=True)
    return nn.functional.avg_pool2d(alike, 3, 1)


def test_filters_whiten_patches():
    """What they give of the pictures, before GELU, is uncorrelated, with a variance of 1 but for
    EPSILON."""
    pictures, stem = correlated_pictures(), WhitenedStem(3).double()
    stem.fit(pictures)
    found = nn.functional.conv2d(pictures, stem.weight).transpose(0, 1).flatten(1)
    ours, negated = found.split(12)
    torch.testing.assert_close(negated, -ours)
    covariance = ours @ ours.T / ours.shape[1]
    patches = nn.functional.unfold(pictures, 2).transpose(0, 1).flatten(1)
    variances = torch.linalg.eigvalsh(patches @ patches.T / patches.shape[1])
    expected = torch.diag(variances / (variances + EPSILON))
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-9)


def test_the_network_in_plain_words():
    """Layer by layer, in float64; nothing in the stem, and no scale of BatchNorm, is trained."""
    torch.manual_seed(0)
    net, x = AirbenchNet(7, width=4).double(), correlated_pictures(20).tile(1, 1, 3, 3)
    net.stem.fit(x)
    y = nn.functional.gelu(nn.functional.conv2d(x, net.stem.weight))
    for group in net.groups:
        for conv, norm, pools in (
            (group.conv1, group.norm1, True), (group.conv2, group.norm2, False),
        ):  # fmt: skip
            y = nn.functional.conv2d(y, conv.weight, padding=1)
            y = nn.functional.max_pool2d(y, 2) if pools else y
            mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), False, keepdim=True)
            y = nn.functional.gelu((y - mean) / (var + norm.eps).sqrt() + norm.bias[:, None, None])
    expected = y.amax((2, 3)) @ net.fc.weight.T
    torch.testing.assert_close(net(x), expected)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert not any("stem" in n or ("norm" in n and "weight" in n) for n in trained)
    assert "stem.weight" in net.state_dict()


def test_kernels_begin_as_identities():
    conv = AirbenchNet(width=8).groups[0].conv2
    x = torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(conv(x), x)


@pytest.mark.parametrize("mode", ["speed", "memory"])
def test_a_resnet_with_this_stem_is_fused_all_the_same(mode):
    torch.manual_seed(0)
    net, x = ResNet(18, width=8, stem="whiten").double(), correlated_pictures(4).tile(1, 1, 2, 2)
    net.conv1.fit(x)
    results = []
    for fused in ("none", mode):
        for module in net.modules():
            if hasattr(type(module), "fused"):
                module.fused = fused
        net.zero_grad()
        net(x).square().sum().backward()
        results.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "flags",
    [
        "--depth 8 --optimizer muon --muon_normalize --lr 0.03",
        "--depth 18 --stem whiten --lr 0.3",
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(run_resnet, tmp_path, flags):
    """The filters are in the checkpoint."""
    run = f"--dataset shapes --width 4 --epochs 2 --batch_size 100 --sched constant {flags}"
    assert run_resnet(f"{run} --output whole") == 0
    assert run_resnet(f"{run} --output parts --max_steps 7") == 0
    assert run_resnet("--resume parts --max_steps 1000") == 0
    whole, parts = (
        json.loads((tmp_path / f / "summary.json").read_text()) for f in ("whole", "parts")
    )
    assert whole["test_loss"] == parts["test_loss"]


def test_weights_of_another_stem_are_told_apart():
    tensors = ResNet(18, width=8, stem="whiten").state_dict()
    assert ResNet(34, width=4).flags_for(tensors) == ["--stem whiten", "--width 8", "--depth 18"]
    others = ResNet(18, width=8).state_dict()
    assert ResNet(18, width=8, stem="whiten").flags_for(others) == ["--stem cifar"]


def test_another_stem_is_refused(run_resnet, capsys):
    assert run_resnet("--depth 8 --stem cifar") == 2
    assert "--stem cifar: --depth 8 has a whitened one" in capsys.readouterr().err
    assert run_resnet("--depth 8 --dataset shapes --image_size 8") == 2
    assert "9 pixels or more: --image_size 32" in capsys.readouterr().err
