"""Where the head, the blocks and the depths of parameters are."""

import pytest
import timm
import torch
from torch import nn

from utils.errors import UserError
from utils.models.parts import blocks_of, depths_of, heads_of
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.models.vit import ViT

MODELS = {
    "resnet": lambda: ResNet(18, 10, 4),
    "transformer": lambda: Transformer(100, 4, 3, 16, 2, 32),
    "vit": lambda: ViT(layers=3, dim=16, heads=2, ffn=32),
    "timm vit": lambda: timm.create_model("test_vit"),
    "timm convnext": lambda: timm.create_model("test_convnext"),
    "timm efficientnet": lambda: timm.create_model("test_efficientnet"),
    "timm resnet": lambda: timm.create_model("test_resnet"),
    "foreign": lambda: Foreign(),
}


class Foreign(nn.Module):
    """A model that says nothing of itself."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.answer = nn.Linear(4, 5)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_lie_between_stem_and_head(name):
    model = MODELS[name]()
    blocks, depths = blocks_of(model), depths_of(model)
    heads = heads_of(model)
    assert len(blocks) >= 3
    owners = [p for block in blocks for p in block.parameters()]
    assert len(owners) == len(set(owners))
    assert depths.keys() == dict(model.named_parameters()).keys()
    assert {0, len(blocks)} <= set(depths.values()) == set(range(max(depths.values()) + 1))
    of_head = [depths[n] for n in depths if any(n.startswith(f"{head}.") for head in heads)]
    assert of_head and set(of_head) == {max(depths.values())}
    assert depths[next(iter(depths))] == 0
    names = {p: n for n, p in model.named_parameters()}
    of_blocks = [{depths[names[p]] for p in block.parameters()} for block in blocks]
    assert all(len(found) == 1 for found in of_blocks)
    numbers = [found.pop() for found in of_blocks]
    assert numbers == sorted(set(numbers)) and numbers[0] >= 1


@pytest.mark.parametrize("name", ["vit", "timm vit"])
def test_all_blocks_of_a_vit_are_found(name):
    """Among them the last one, which timm puts at one depth with the norm behind it."""
    model = MODELS[name]()
    assert blocks_of(model) == list(model.blocks)
    assert depths_of(model)["norm.weight"] == len(model.blocks)


def test_a_head_that_is_defined_first_is_the_deepest():
    model = Foreign()
    first = nn.ModuleDict({"answer": model.answer, "stem": model.stem})
    first.layers, first.BLOCKS, first.HEAD = model.layers, ("layers",), "answer"
    depths = depths_of(first)
    assert (depths["answer.weight"], depths["stem.weight"], depths["layers.1.bias"]) == (4, 0, 2)


def test_heads():
    assert heads_of(MODELS["resnet"]()) == ("fc",)
    assert heads_of(MODELS["foreign"]()) == ("answer",)
    assert heads_of(timm.create_model("test_resnet")) == ("fc",)
    with torch.device("meta"):
        distilled = timm.create_model("deit_tiny_distilled_patch16_224")
    assert heads_of(distilled) == ("head", "head_dist")
    with pytest.raises(UserError, match="Sequential has no attribute HEAD"):
        heads_of(nn.Sequential(nn.Conv2d(3, 4, 3)))
