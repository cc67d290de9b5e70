"""ResNet against torchvision's: the same keys, and with the same weights the same numbers."""

import pytest
import torch
import torchvision

from utils.models.resnet import STAGES, ResNet


def torchvision_resnet(depth: int, **settings):
    return getattr(torchvision.models, f"resnet{depth}")(weights=None, **settings)


@pytest.mark.parametrize("depth", STAGES)
def test_state_dict_is_torchvisions(depth):
    with torch.device("meta"):  # shapes alone
        ours = ResNet(depth, 1000, stem="imagenet").state_dict()
        theirs = torchvision_resnet(depth).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {
        key: value.shape for key, value in theirs.items()
    }
    assert list(ours) == list(theirs)


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


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_outputs_gradients_and_statistics_are_torchvisions(depth, training):
    ours, theirs = random_pair(depth)
    images = torch.randn(3, 3, 64, 48, dtype=torch.float64)
    weights = torch.randn(3, 7, dtype=torch.float64)
    outputs, gradients = [], []
    for model in (ours, theirs):
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


def test_same_seed_same_weights():
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(ResNet(18, 4, width=4).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("wrong", [{"depth": 20}, {"stem": "mnist"}])
def test_wrong_depth_or_stem(wrong):
    with pytest.raises(ValueError, match="is one of"):
        ResNet(**wrong)
