"""Models by name, from timm and from files of the user's own, and what is said of wrong names."""

import pytest
import torch
from torch import nn

import vit_test
from utils.errors import UserError
from utils.launch.signals import StoppedBySignal
from utils.models import named
from utils.settings.config import parse
from utils.weights.card import ModelCard

OWN = """
from torch import nn
from beside import WIDTH

class Net(nn.Sequential):
    def __init__(self, classes, width=WIDTH):
        super().__init__(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, classes))

class Wide(Net):
    pass

def function(): pass

class Odd(nn.Module):
    def __init__(self, classes):
        raise ValueError("width must be even")

class Divided(nn.Module):
    def __init__(self, classes):
        self.part = 1 / 0

class Unread(nn.Module):
    def __init__(self, classes):
        open("nowhere.pth")

class Unnamed(Net):
    def forward(self, x):
        return undefined(x)

class Fixed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3072, 10))
"""
PICTURES = {"height": 32, "width": 32, "channels": 3}


def refused(*parts, function, **arguments) -> None:
    with pytest.raises(UserError) as error:
        function(**arguments)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_names_are_found_by_a_word_or_a_pattern():
    assert "vit_base_patch32_224" in named.timm_names("vit_base_patch32*")
    assert named.timm_names("deit3_small") == ["deit3_small_patch16_224", "deit3_small_patch16_384"]
    assert len(named.timm_names()) > 900
    refused("no model of timm matches 'vit_bse_patch16_224' (near: vit_base_patch16_224",
            function=named.timm_names, pattern="vit_bse_patch16_224")  # fmt: skip


def test_a_model_of_timm_gets_the_pictures_size_and_the_arguments():
    model = named.timm_model("test_vit.r160_in1k", 7, 64, 48, 1, {"drop_rate": 0.3})
    assert model(torch.zeros(2, 1, 64, 48)).shape == (2, 7)
    assert model.head_drop.p == 0.3
    model = named.timm_model("test_convnext", 7, 64, 48, 3)  # takes pictures of any size
    assert model(torch.zeros(2, 3, 64, 48)).shape == (2, 7)


def test_models_that_cannot_be():
    of_timm = {"function": named.timm_model, "classes": 5, **PICTURES}
    refused("has no such model", "vit_base", "FILE.py:CLASS", name="vit_bse", **of_timm)
    refused("cannot be built for pictures of 32x32 pixels with --model_kwargs nonsense=1: ",
            name="test_resnet", arguments={"nonsense": 1}, **of_timm)  # fmt: skip
    model = named.timm_model("test_vit", 5, 160, 160, 3)
    refused("--model test_vit does not take pictures of 32x32 pixels in 1 channel: ",
            function=named.check_pictures, model=model, name="test_vit", classes=5,
            **PICTURES | {"channels": 1})  # fmt: skip
    refused("answers a picture with (1, 5), not with (1, 6)", function=named.check_pictures,
            model=model, name="test_vit", classes=6, height=160, width=160,
            channels=3)  # fmt: skip
    refused("--model vit: ", "whole patches of 5", function=named.own_vit, classes=5, **PICTURES,
            patch_size=5, layers=1, dim=8, heads=2, ffn=8, pooling="cls", positions="learned",
            arguments={})  # fmt: skip
    with pytest.raises(TypeError, match="dim"):
        named.own_vit(5, **PICTURES, patch_size=8, layers=1, heads=2, ffn=8, pooling="cls",
                      positions="learned", arguments={})  # fmt: skip


@pytest.mark.parametrize("text", ["act_layer=foo", "weight_init=foo"])
def test_wrong_values_of_arguments(text):
    """timm raises KeyError, and AssertionError without a text."""
    sizes = {"layers": 1, "dim": 8, "heads": 2, "ffn": 8, "pooling": "cls", "positions": "learned"}
    arguments = named.arguments_of(text)
    refused(f"--model vit with --model_kwargs {text}: ", "Error", function=named.own_vit,
            classes=5, **PICTURES, patch_size=8, **sizes, arguments=arguments)  # fmt: skip
    refused(f"with --model_kwargs {text}: ", "Error", function=named.timm_model, name="test_vit",
            classes=5, **PICTURES, arguments=arguments)  # fmt: skip


class Auxiliary(nn.Module):
    """Answers in training as torchvision's GoogLeNet and Inception do."""

    def __init__(self, classes=5):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        self.head, self.auxiliary = nn.Linear(4, classes), nn.Linear(4, classes)

    def forward(self, x):
        x = self.body(x).mean((2, 3))
        return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)


def test_auxiliary_heads_are_refused_before_training(monkeypatch):
    model = Auxiliary()
    named.check_pictures(model, "it", 5, **PICTURES)
    refused("--model it: in training it answers with a tuple; auxiliary heads are not supported",
            function=named.check_training, model=model, name="it", **PICTURES)  # fmt: skip
    monkeypatch.setattr(named, "own_class", lambda place, classes, arguments: Auxiliary(classes))
    card = ModelCard(("a", "b"), (0.5,) * 3, (0.5,) * 3, 32, 32, 3)
    settings, _ = parse(vit_test.Settings, ["--model", "it.py:Net"], "")
    refused("auxiliary heads", function=vit_test.build_model, settings=settings, card=card)
    settings.eval_only = True
    assert isinstance(vit_test.build_model(settings, card), Auxiliary)


class Careless(nn.Module):
    def forward(self, x):
        raise KeyError("mask")


def test_any_error_of_a_model_that_is_shown_a_picture_is_told():
    refused("--model it does not take pictures of 32x32 pixels", "KeyError: 'mask'",
            function=named.check_pictures, model=Careless(), name="it", classes=5,
            **PICTURES)  # fmt: skip
    named.check_training(Careless(), "it", **PICTURES)  # the first step says so


class Ghosts(nn.Module):
    """It needs batches of fours in training, and replaces its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
            x.view(-1, 4, *x.shape[1:])
        return x.mean((2, 3))


def test_checking_a_model_in_training_leaves_it_as_it_was():
    model = Ghosts()
    named.check_training(model, "it", **PICTURES)
    assert model.seen == 0


def test_checking_the_pictures_changes_nothing():
    model = named.timm_model("test_resnet", 5, **PICTURES, arguments={"drop_rate": 0.5})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    named.check_pictures(model, "test_resnet", 5, **PICTURES)
    named.check_training(model, "test_resnet", **PICTURES)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Keeper(nn.Module):
    """It makes a mask and the weights of a layer in its first pass."""

    def __init__(self):
        super().__init__()
        self.middle, self.answer, self.mask = nn.LazyLinear(6), nn.Linear(6, 5), None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[2:])
        return self.answer(self.middle((x * self.mask).flatten(1)))


def test_what_a_model_makes_in_its_first_pass_can_be_trained():
    model = Keeper()
    named.check_pictures(model, "it", 5, **PICTURES)
    model(torch.ones(2, 3, 32, 32, requires_grad=True)).sum().backward()
    assert model.middle.weight.shape == (6, 3 * 32 * 32)
    assert all(p.grad is not None for p in model.parameters())


def test_a_class_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    (tmp_path / "beside.py").write_text("WIDTH = 6")
    model = named.own_class(f"{file}:Net", 5, {})
    assert isinstance(model, nn.Sequential) and model[3].weight.shape == (5, 6)
    assert named.own_class(f"{file}:Wide", 5, {"width": 3})[3].weight.shape == (5, 3)
    wrong = {"function": named.own_class, "classes": 5, "arguments": {}}
    refused("no nn.Module named Nut; it has Net, Wide", place=f"{file}:Nut", **wrong)
    refused("function is no nn.Module; name one, such as Net", place=f"{file}:function", **wrong)
    refused("name the nn.Module after a colon, as in", place=f"{file}:", **wrong)
    refused("there is no file nowhere.py", place="nowhere.py:Net", **wrong)
    refused("Net(classes) failed: ", "--model_kwargs", place=f"{file}:Net",
            **wrong | {"arguments": {"wdth": 3}})  # fmt: skip
    refused("Odd(classes) failed in line 17: ValueError: width must be even;",
            place=f"{file}:Odd", **wrong)  # fmt: skip
    refused("Divided(classes) failed in line 21: ZeroDivisionError: ", place=f"{file}:Divided",
            **wrong)  # fmt: skip
    refused("Unread(classes) failed in line 25: FileNotFoundError: ", "nowhere.pth",
            place=f"{file}:Unread", **wrong)  # fmt: skip
    model = named.own_class(f"{file}:Unnamed", 5, {})
    fixed = named.own_class(f"{file}:Fixed", 5, {})
    refused("answers a picture with (1, 10), not with (1, 5)", function=named.check_pictures,
            model=fixed, name=f"{file}:Fixed", classes=5, **PICTURES)  # fmt: skip
    refused("32x32 pixels in 3 channels in line 29: NameError: name 'undefined' is not defined",
            function=named.check_pictures, model=model, name=f"{file}:Unnamed", classes=5,
            **PICTURES)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import not_there", " in line 1: ModuleNotFoundError: No module named 'not_there'"),
        ("\nx = undefined", " in line 2: NameError: name 'undefined' is not defined"),
        ("open('nowhere.pth')", " in line 1: FileNotFoundError: "),
        ("\n\n1 / 0", " in line 3: ZeroDivisionError: division by zero"),
        ("x = (", ": SyntaxError: '(' was never closed (broken.py, line 1)"),
    ],
)
def test_any_error_of_a_file_is_told_with_its_line(tmp_path, text, why):
    file = tmp_path / "broken.py"
    file.write_text(text)
    place = f"{file}:Net"
    refused(f"--model {place}: {file} cannot be imported{why}", function=named.check_name,
            name=place)  # fmt: skip


def test_a_signal_passes_through_an_own_file(tmp_path):
    file = tmp_path / "stopped.py"
    stop = "from utils.launch.signals import StoppedBySignal\nraise StoppedBySignal(15, 'stopped')"
    for text, kind in (("raise KeyboardInterrupt", KeyboardInterrupt), (stop, StoppedBySignal)):
        file.write_text(text)
        with pytest.raises(kind):
            named.check_name(f"{file}:Net")


def test_a_file_is_imported_again_only_if_it_was_changed(tmp_path):
    """A file may register its model elsewhere, which must not happen twice."""
    file = tmp_path / "counted.py"
    line = f"open({str(tmp_path / 'imports')!r}, 'a').write('x')"
    file.write_text(f"{line}\nfrom torch import nn\nclass Net(nn.Module): pass\n")
    named.check_name(f"{file}:Net")
    named.check_name(f"{file}:Net")
    assert (tmp_path / "imports").read_text() == "x"
    file.write_text(file.read_text().replace("Net", "Other"))
    named.check_name(f"{file}:Other")


def test_arguments():
    text = "pos_drop_rate=0.1,qkv_bias=false depth=3,init_values=1e-5,act_layer=relu,fc_norm=none"
    assert named.arguments_of(text) == {
        "pos_drop_rate": 0.1, "qkv_bias": False, "depth": 3, "init_values": 1e-5,
        "act_layer": "relu", "fc_norm": None,
    }  # fmt: skip
    assert named.arguments_of(None) == {}
    for wrong in ("depth", "=3", "depth=", "a-b=3"):
        refused(
            f"--model_kwargs {wrong}: write name=value", function=named.arguments_of, text=wrong
        )


def test_gradient_checkpointing_gives_the_same_gradients():
    torch.manual_seed(0)
    model = named.timm_model("test_vit", 5, **PICTURES).double()
    x, gradients = torch.randn(4, 3, 32, 32, dtype=torch.float64), []
    for checkpointed in (False, True):
        if checkpointed:
            named.checkpoint_gradients(model, "test_vit")
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    refused("Linear has no method set_grad_checkpointing", function=named.checkpoint_gradients,
            model=nn.Linear(2, 2), name="Linear")  # fmt: skip


def test_a_network_of_a_fixed_size_is_not_evaluated_at_another():
    argv = ["--dataset", "imagefolder", "--image_size", "8", "--eval_size", "12", "--dim", "8"]
    argv += ["--layers", "1", "--heads", "2", "--ffn", "8", "--patch_size", "4"]
    settings, _ = parse(vit_test.Settings, argv, "")
    card = ModelCard(("a", "b"), (0.5,) * 3, (0.5,) * 3, 12, 12, 3)
    with pytest.raises(UserError, match="--eval_size 12: --model vit takes pictures of a single"):
        vit_test.build_model(settings, card)


@pytest.mark.parametrize("flag", ["drop_rate", "drop_path"])
def test_a_rate_is_given_once(flag):
    argument = {"drop_rate": "drop_rate", "drop_path": "drop_path_rate"}[flag]
    argv = [f"--{flag}", "0.1", "--model_kwargs", f"{argument}=0.5"]
    settings, _ = parse(vit_test.Settings, argv, "")
    refused(f"--{flag} and --model_kwargs {argument}=0.5 set the same: leave one of them out",
            function=vit_test.check_model, settings=settings)  # fmt: skip
    settings.resume = "run"  # of an earlier run, in which the flag counts
    vit_test.check_model(settings)
    vit_test.check_model(parse(vit_test.Settings, argv[2:], "")[0])
