"""Helpers for the tests of pretrained weights."""

import pytest
import torch

from utils.errors import UserError
from utils.models.resnet import ResNet
from utils.weights.pretrained import fit_weights, load_pretrained
from utils.weights.published import load_imagenet

CARD = {
    "classes": ["cat", "dog"],
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "height": 8,
    "width": 8,
    "channels": 3,
}


def resnet(depth=18, classes=5, width=4, seed=0, **settings) -> ResNet:
    torch.manual_seed(seed)
    return ResNet(depth, classes, width, **settings)


def trained(**settings) -> dict:
    """Weights and statistics that differ from those of a new model."""
    state = resnet(seed=1, **settings).state_dict()
    return {name: torch.rand_like(t) if t.is_floating_point() else t for name, t in state.items()}


def fitted(model, source) -> list[str]:
    said = []
    fit_weights(model, load_pretrained(source, said.append), say=said.append)
    return said


def refused(source, *parts, model=None) -> str:
    with pytest.raises(UserError) as error:
        loaded = load_imagenet("resnet18") if source == "imagenet" else load_pretrained(source)
        fit_weights(model or resnet(), loaded)
    message = str(error.value)
    assert "\n" not in message and "\x1b" not in message, message
    for part in parts:
        assert str(part) in message, message
    return message


def assert_holds(model, tensors: dict) -> None:
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
