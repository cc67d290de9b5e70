"""Where the head, the blocks and the depths of parameters are."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
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


class Pair(nn.Module):
    """Lists of layers before the head, and a list with the head in it."""

    def __init__(self, name_of_head: str, **lists: nn.Module):
        super().__init__()
        self.HEAD, self.stem = name_of_head, nn.Linear(4, 4)
        for name, layers in lists.items():
            self.add_module(name, layers)


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


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


@pytest.mark.parametrize("head", ["head", "head.1"])
def test_layers_of_a_head_are_no_blocks(head):
    """As in a classifier of several layers behind torchvision's `features`."""
    model = Pair(head, layers=linears(3), head=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    assert blocks_of(model) == [*model.layers]
    depths = depths_of(model)
    assert [depths[f"layers.{number}.weight"] for number in range(3)] == [1, 2, 3]
    assert depths["stem.weight"] == 0 and depths["head.0.weight"] == depths["head.1.weight"] == 4


def test_the_head_may_be_the_last_of_the_only_list():
    model = Pair("all.3", all=linears(4))
    assert blocks_of(model) == [*model.all][:3]
    assert [depths_of(model)[f"all.{number}.bias"] for number in range(4)] == [1, 2, 3, 4]


def test_blocks_are_found_in_a_model_without_a_head():
    """FSDP needs none."""
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)))
    assert blocks_of(model) == [*model[0]]
    model.HEAD = "nowhere"
    assert blocks_of(model) == [*model[0]]


@pytest.mark.parametrize("name", ["poolformer_s12", "pit_ti_224", "csatv2", "test_vit"])
def test_depths_are_those_of_timm(name):
    """Also where a model of timm has no `group_matcher`, as the first three."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5)
    depths, scales = depths_of(model), {}
    for group in param_groups_layer_decay(model, layer_decay=0.5):
        scales |= dict.fromkeys(group["params"], group["lr_scale"])
    top = max(depths.values())
    assert all(scales[p] == 0.5 ** (top - depths[n]) for n, p in model.named_parameters())
    head = model.get_submodule(heads_of(model)[0])
    assert not set(head.parameters()) & {p for b in blocks_of(model) for p in b.parameters()}


def test_heads():
    assert heads_of(MODELS["resnet"]()) == ("fc",)
    assert heads_of(MODELS["foreign"]()) == ("answer",)
    assert heads_of(timm.create_model("test_resnet")) == ("fc",)
    with torch.device("meta"):
        distilled = timm.create_model("deit_tiny_distilled_patch16_224")
    assert heads_of(distilled) == ("head", "head_dist")
    with pytest.raises(UserError, match="Sequential has no attribute HEAD"):
        heads_of(nn.Sequential(nn.Conv2d(3, 4, 3)))
