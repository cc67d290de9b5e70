"""fit_weights: what fits a model, what is adapted, what is refused. And the model card."""

import json

import pytest
import timm
import torch
from torch.nn.utils.parametrizations import weight_norm
from weight_tools import CARD, assert_holds, resnet, trained

from utils.errors import UserError
from utils.models.resnet import ResNet
from utils.weights.card import ModelCard
from utils.weights.pretrained import Pretrained, fit_weights, load_pretrained

# ---- what fits --------------------------------------------------------------------------------


def pretrained(tensors) -> Pretrained:
    return Pretrained(tensors, "file.pth")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t, "head of 5 classes replaced by one of 2"),
        (lambda t: {n: v for n, v in t.items() if "fc." not in n}, "there is no head"),
    ],
)
def test_head_of_another_size_stays_fresh(change, says):
    model, said = resnet(classes=2), []
    fresh = model.fc.weight.clone()
    fit_weights(model, pretrained(change(trained())), say=said.append)
    assert len(said) == 1 and says in said[0] and "\n" not in said[0]
    assert torch.equal(model.fc.weight, fresh)
    assert torch.equal(model.bn1.running_var, trained()["bn1.running_var"])


def of_classes(*names: str) -> Pretrained:
    """Weights of a run on these classes."""
    card = ModelCard(names, (0.5,) * 3, (0.2,) * 3, 8, 8, 3)
    return Pretrained(trained(classes=len(names)), "run", card=card)


def test_a_head_of_the_same_classes_is_sorted():
    weights, model, said = of_classes("ant", "bee", "cat"), resnet(classes=3), []
    fit_weights(model, weights, said.append, True, ("cat", "ant", "bee"))
    assert said == ["run: the head's classes are sorted as those of the data"]
    for name in ("fc.weight", "fc.bias"):
        assert torch.equal(model.state_dict()[name], weights.tensors[name][[2, 0, 1]])
    fit_weights(model, weights, said.append, True, ("ant", "bee", "cat"))
    assert torch.equal(model.fc.weight, weights.tensors["fc.weight"]) and len(said) == 1


def test_a_head_of_as_many_other_classes_stays_fresh():
    weights, model, said = of_classes("ant", "bee", "cat"), resnet(classes=3), []
    fresh = model.fc.weight.clone()
    fit_weights(model, weights, said.append, False, ("ant", "bee", "dog"))
    assert said == ["run: head of 3 other classes, such as 'cat', replaced by one of 3"]
    assert torch.equal(model.fc.weight, fresh)
    with pytest.raises(UserError, match="trained for other classes, such as 'cat', and"):
        fit_weights(model, weights, said.append, True, ("ant", "bee", "dog"))


def test_classes_may_have_other_names():
    weights, model, said = of_classes("0", "1", "2"), resnet(classes=3), []
    fit_weights(model, weights, said.append, True, ("ant", "bee", "cat"))
    assert len(said) == 1 and "other names, such as '0'" in said[0]
    assert torch.equal(model.fc.weight, weights.tensors["fc.weight"])


# ---- prefixes ---------------------------------------------------------------------------------


def named(prefix: str, plus: float = 0, head: bool = True) -> dict:
    weights = {n: t + plus for n, t in trained().items() if head or not n.startswith("fc.")}
    return {prefix + name: tensor for name, tensor in weights.items()}


def fit(tensors: dict) -> tuple[str, bool]:
    """(what is said first, whether `trained()` was loaded with its head)."""
    model, said = resnet(), []
    fit_weights(model, pretrained(tensors), said.append)
    assert torch.equal(model.conv1.weight, trained()["conv1.weight"])
    return said[0], torch.equal(model.fc.weight, trained()["fc.weight"])


QUEUE = {"module.queue": torch.rand(3, 3), "module.encoder_q.fc.2.weight": torch.rand(9, 4)}
MOCO = named("module.encoder_k.", 1) | QUEUE | named("module.encoder_q.", head=False)


@pytest.mark.parametrize(
    ("tensors", "says", "has_head"),
    [
        (named("backbone."), "122 tensors loaded without the prefix backbone.", True),
        (named("model.backbone."), "122 tensors loaded without the prefix model.backbone.", True),
        (named("a.b.c."), "122 tensors loaded without the prefix a.b.c.", True),
        (
            named("0.", head=False) | {"1.weight": torch.rand(5, 32), "1.bias": torch.rand(5)},
            "120 tensors loaded without the prefix 0.; 2 left out, such as 1.weight",
            False,
        ),
        ({"0.mean": torch.ones(3)} | named("1."), "the prefix 1.; 1 left out, such as 0.m", True),
        (MOCO, "120 tensors loaded without the prefix module.encoder_q.; 123 left", False),
        (named("momentum_net.", 1) | named("net."), "the prefix net.; 122 left out", True),
        (named("model.net.") | named("net."), "the prefix model.net.; 122 left out", True),
        (
            named("model.", head=False) | {n: t for n, t in trained().items() if "fc." in n},
            "122 tensors loaded without the prefix model.",
            True,
        ),
    ],
    ids=["backbone", "nested", "deep", "Sequential", "normalised", "MoCo", "momentum", "shared",
         "head outside"],
)  # fmt: skip
def test_the_prefix_without_which_most_fits(tensors, says, has_head):
    said, head = fit(tensors)
    assert says in said and "\n" not in said
    assert head == has_head


def test_of_two_that_fit_one_is_chosen(tmp_path):
    for one, other in (("student.", "teacher."), ("", "ema.")):
        both = named(one) | named(other, 1)
        with pytest.raises(UserError, match=rf"{one}\* and {other}\* .* FILE:{other[:-1]}"):
            fit_weights(resnet(), pretrained(both))
    path = tmp_path / "dino.pth"
    torch.save({"student": named("module.", 1), "teacher": named(""), "epoch": 3}, path)
    chosen = load_pretrained(f"{path}:teacher")
    assert chosen.source_text == f"{path}:teacher"
    ema = tmp_path / "ema.pth"
    torch.save({"model": named("", 1), "model_ema": named("")}, ema)
    weights = load_pretrained(f"{ema}:model_ema").tensors
    assert torch.equal(weights["conv1.weight"], chosen.tensors["conv1.weight"])
    fit_weights(model := resnet(), chosen)
    assert_holds(model, trained())
    with pytest.raises(UserError, match=r"dino.pth:other: no name in the file begins with other\."):
        load_pretrained(f"{path}:other")


def test_advice_for_weights_with_a_prefix():
    deep = {f"net.{name}": tensor for name, tensor in trained(depth=50).items()}
    with pytest.raises(UserError, match="train with --depth 50"):
        fit_weights(resnet(), pretrained(deep))


# ---- heads, colours, other architectures ------------------------------------------------------


class OwnHead(torch.nn.Module):
    """A model of the user's own."""

    HEAD = "head"

    def __init__(self, classes: int, last: torch.nn.Module):
        super().__init__()
        self.body = torch.nn.Linear(4, 5)
        self.head = torch.nn.Sequential(torch.nn.Linear(5, 600), torch.nn.ReLU(), last)


@pytest.mark.parametrize("times", (1, 1.9, 3, 20))
@pytest.mark.parametrize("wrap", (lambda layer: layer, weight_norm))
def test_a_new_head_is_as_large_as_pytorchs(wrap, times):
    """Larger weights are scaled, where the last layer is a plain linear one."""
    weights = pretrained(OwnHead(3, torch.nn.Linear(600, 3)).state_dict())
    last, usual = torch.nn.Linear(600, 2), 1800**-0.5
    with torch.no_grad():
        last.weight.mul_(times * usual / last.weight.std())
    model = OwnHead(2, wrap(last))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit_weights(model, weights, lambda line: None)
    for name, tensor in model.state_dict().items():
        if name.startswith("body."):
            assert torch.equal(tensor, weights.tensors[name])
        elif name == "head.2.weight" and times > 2:
            torch.testing.assert_close(tensor, before[name] / times)
        else:
            assert torch.equal(tensor, before[name])


def test_timms_large_heads_are_scaled():
    model = timm.create_model("mobilenetv3_small_050", num_classes=10)
    theirs = timm.create_model("mobilenetv3_small_050", num_classes=30).state_dict()
    assert model.classifier.weight.std().item() > 0.1
    fit_weights(model, pretrained(theirs), lambda line: None)
    assert model.classifier.weight.std().item() == pytest.approx((3 * 1024) ** -0.5, rel=1e-4)


def test_names_that_begin_like_those_of_a_wrapper():
    """A model of the user's own, with an attribute `model`: files lose that prefix."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(3, 2)

    own, tensors = Own(), {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    fit_weights(own, pretrained(tensors))
    assert torch.equal(own.model.weight, tensors["weight"])


def gray(model: ResNet) -> ResNet:
    model.conv1 = torch.nn.Conv2d(1, 4, 3, padding=1, bias=False)
    return model


def test_colours_are_summed_for_gray_pictures():
    colour, said = resnet(), []
    colour.load_state_dict(trained())
    model = gray(resnet())
    fit_weights(model, pretrained(trained()), say=said.append)
    assert len(said) == 1 and "conv1.weight summed over its 3 colours" in said[0]
    images = torch.rand(2, 1, 8, 8)
    with torch.inference_mode():
        expected = colour.eval()(images.expand(2, 3, 8, 8))
        torch.testing.assert_close(model.eval()(images), expected, rtol=1e-4, atol=1e-4)


def test_normalisation_of_gray_pictures():
    known = Pretrained({}, "", (0.1, 0.2, 0.6), (0.2, 0.3, 0.4))
    assert known.normalisation(3) == ((0.1, 0.2, 0.6), (0.2, 0.3, 0.4))
    assert known.normalisation(1) == (pytest.approx((0.3,)), pytest.approx((0.3,)))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"stem": "imagenet"}, "train with --stem imagenet"),
        ({"width": 8}, "train with --width 8"),
        ({"depth": 34}, "train with --depth 34"),
        ({"depth": 50, "width": 2}, "train with --width 2 --depth 50"),
    ],
)
def test_another_architecture_is_named(settings, advice):
    model = resnet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        fit_weights(model, pretrained(trained(**settings)))
    assert "does not fit the model" in str(error.value) and advice in str(error.value)
    assert_holds(model, before)  # nothing was applied


def test_up_to_three_tensors_are_named_with_both_shapes():
    tensors = trained()
    tensors["conv1.weight"] = torch.rand(4, 3, 7, 7)
    shapes = r"train with .*\(conv1.weight is 4x3x7x7, in the model 4x3x3x3\)"
    with pytest.raises(UserError, match=shapes):
        fit_weights(resnet(), pretrained(tensors))
    tensors = trained() | {f"extra{i}": torch.ones(2, 3) for i in range(5)}
    extra = r": give .*\(extra0 2x3 has no place .*extra2 .* and 2 more\)"
    with pytest.raises(UserError, match=extra):
        fit_weights(resnet(), pretrained(tensors))
    tensors = trained()
    del tensors["bn1.weight"]
    with pytest.raises(UserError, match=r"bn1.weight 4 is missing"):
        fit_weights(resnet(), pretrained(tensors))
    with pytest.raises(UserError, match=r"pictures of 3 channels|no model here has"):
        fit_weights(gray(resnet()), pretrained({"conv1.weight": torch.ones(4, 2, 3, 3)}))


def test_gray_weights_do_not_fit_colours():
    with pytest.raises(UserError, match="train with pictures of 1 channels"):
        fit_weights(resnet(), pretrained(gray(resnet()).state_dict()))


def test_numbers_that_are_not_finite():
    tensors = trained()
    tensors["layer4.1.bn2.bias"][0] = float("nan")
    model = resnet()
    before = model.conv1.weight.clone()
    with pytest.raises(UserError, match=r"layer4.1.bn2.bias holds values that are not finite"):
        fit_weights(model, pretrained(tensors))
    assert torch.equal(model.conv1.weight, before)


# ---- the card ---------------------------------------------------------------------------------


def test_card_round_trip():
    card = ModelCard.from_dict(CARD | {"something": "new"})
    assert card.classes == ("cat", "dog") and card.std == (0.4, 0.5, 0.6)
    assert ModelCard.from_dict(json.loads(json.dumps(card.to_dict()))) == card


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classes": []}, "classes must be"),
        ({"classes": "cat"}, "classes must be a list"),
        ({"mean": [0.1]}, "mean must be one finite number"),
        ({"std": [0.1, 0.2, float("inf")]}, "std must be one finite number"),
        ({"mean": None}, "mean must be a list"),
        ({"height": 0}, "height must be"),
        ({"width": True}, "width must be"),
        ({"channels": 2}, "channels must be 1 or 3"),
    ],
)
def test_card_of_no_model(change, says):
    with pytest.raises(ValueError, match=says):
        ModelCard.from_dict(CARD | change)


def test_card_that_is_incomplete():
    with pytest.raises(ValueError, match="std is missing"):
        ModelCard.from_dict({name: value for name, value in CARD.items() if name != "std"})
    with pytest.raises(ValueError, match="not a JSON object"):
        ModelCard.from_dict([1])
