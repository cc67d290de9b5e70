"""Pretrained weights from every kind of file, from runs and from torchvision; bad files."""

import argparse
import functools
import json
import os
import pickle
import urllib.error

import numpy
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from weight_tools import CARD, assert_holds, fitted, refused, resnet, trained

import vit_test
from resnet50_test import Settings, build_model, model_name
from utils.checkpoints.checkpoint import RUN_INFO, Checkpoint, Checkpoints
from utils.errors import UserError
from utils.models.resnet import ResNet
from utils.settings.config import parse
from utils.tasks.pictures import Pictures
from utils.weights import published
from utils.weights.pretrained import fit_weights, load_pretrained
from utils.weights.published import load_imagenet

# ---- files ------------------------------------------------------------------------------------


def wrapped(tensors: dict, how: str):
    if how == "torchvision":
        return {"model": tensors, "args": argparse.Namespace(lr=0.1), "epoch": 3, "optimizer": {}}
    if how == "timm":
        other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        return {"arch": "resnet18", "state_dict": other, "state_dict_ema": tensors, "metric": 1.0}
    if how == "averaged":  # what torch.optim.swa_utils.AveragedModel saves
        averaged = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return {"model_ema": averaged | {"n_averaged": torch.tensor(7)}}
    if how == "compiled in DDP":
        return {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    if how == "lightning":
        return {"state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()}}
    return tensors


@pytest.mark.parametrize("ending", ["pth", "pt", "bin", "pth.tar", "ckpt"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pth(tmp_path, ending, zipped):
    path = tmp_path / f"weights.{ending}"
    torch.save(trained(), path, _use_new_zipfile_serialization=zipped)
    model = resnet()
    assert fitted(model, path) == []
    assert_holds(model, trained())


@pytest.mark.parametrize(
    ("how", "nest", "prefix"),
    [
        ("torchvision", " (model)", ""),
        ("timm", " (state_dict_ema)", ""),
        ("averaged", " (model_ema)", "module."),
        ("compiled in DDP", "", "module._orig_mod."),
        ("lightning", " (state_dict)", "model."),
    ],
)
def test_nests_and_prefixes(tmp_path, how, nest, prefix):
    path = tmp_path / "weights.pth"
    torch.save(wrapped(trained(), how), path)
    model = resnet()
    said = [f"{path}{nest}: 122 tensors loaded without the prefix {prefix}"] * bool(prefix)
    assert fitted(model, path) == said
    assert_holds(model, trained())
    assert load_pretrained(path).source_text == f"{path}{nest}"


class Attributes(dict):
    """As Lightning and yacs keep hyperparameters."""


def test_what_a_lightning_checkpoint_holds_besides(tmp_path):
    path = tmp_path / "last.ckpt"
    hyper = Attributes(optimizer=functools.partial(torch.optim.SGD, lr=1), folder=tmp_path)
    hyper |= {"net": torch.nn.Linear(1, 1), "loss": numpy.float64(3), "dtype": torch.float32}
    state = {f"net.{name}": tensor for name, tensor in trained().items()}
    state["criterion.weight"] = torch.ones(3)
    steps = {"state": {0: {"momentum_buffer": torch.ones(2)}}}
    torch.save({"state_dict": state, "hyper_parameters": hyper, "optimizer_states": [steps]}, path)
    model = resnet()
    also, loaded = fitted(model, path)
    assert f"{path} also holds functools.partial, " in also and "could run any code" in also
    assert loaded.endswith("122 tensors loaded without the prefix net.; 1 left out, such as "
        "criterion.weight")  # fmt: skip
    assert_holds(model, trained())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_converted(tmp_path, dtype):
    half = {n: t.to(dtype) if t.is_floating_point() else t for n, t in trained().items()}
    save_file(half, tmp_path / "half.safetensors")
    model = resnet().to(memory_format=torch.channels_last)
    fitted(model, tmp_path / "half.safetensors")
    expected = resnet().state_dict()
    assert_holds(model, {name: half[name].to(expected[name].dtype) for name in expected})
    assert model.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_batch_counters_may_be_missing(tmp_path):
    old = {n: t for n, t in trained().items() if not n.endswith("num_batches_tracked")}
    save_file(old, tmp_path / "old.safetensors")
    model = resnet()
    fitted(model, tmp_path / "old.safetensors")
    assert torch.equal(model.conv1.weight, old["conv1.weight"])


@pytest.mark.parametrize("depth", [18, 50])
def test_torchvisions_weights_give_its_logits(tmp_path, depth):
    torch.manual_seed(3)
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = ResNet(depth, 7, stem="imagenet").eval()
    fitted(ours, tmp_path / "theirs.pth")
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(ours(images), theirs(images))


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_hostile_pickle_is_not_run(tmp_path, zipped):
    path = tmp_path / "hostile.pth"
    torch.save(
        {"model": trained(), "args": Hostile(tmp_path / "made")},
        path,
        _use_new_zipfile_serialization=zipped,
    )
    refused(path, "posix.mkdir", "could run any code", "torch.save(model.state_dict(), path)")
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    refused(path, path)
    assert not (tmp_path / "made").exists()


def test_a_whole_model_is_refused_with_what_to_save(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pth")
    refused(tmp_path / "model.pth", "torch.nn.modules.linear.Linear", "state_dict()")
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "model.pth")
    refused(tmp_path / "model.pth", "torch.nn.modules.linear.Linear", "state_dict()")


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n <!DOCTYPE html><html>404</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"\xff" * 100, "not a file of weights"),
    ],
)
def test_files_that_are_no_weights(tmp_path, ending, content, says):
    path = tmp_path / f"weights.{ending}"
    path.write_bytes(content)
    refused(path, path, says)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_half_a_file(tmp_path, ending):
    path = tmp_path / f"weights.{ending}"
    torch.save(trained(), path) if ending == "pth" else save_file(trained(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(path, path, "damaged or not a file of weights", "again")


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, torch.ones(2), {1: torch.ones(2)}])
def test_no_named_weights(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    refused(tmp_path / "weights.pth", "no named weights")


@pytest.mark.parametrize("nest", ["model_state_dict", "net", "weights"])
def test_files_as_tutorials_write_them(tmp_path, nest):
    content = {"epoch": 3, "optimizer_state_dict": {"state": {}}, nest: trained()}
    torch.save(content, tmp_path / "weights.pth")
    model = resnet()
    fitted(model, tmp_path / "weights.pth")
    assert_holds(model, content[nest])
    torch.save({"epoch": 3, "my_model": content[nest]}, tmp_path / "weights.pth")
    assert "the prefix my_model." in fitted(model, tmp_path / "weights.pth")[0]
    torch.save({"epoch": 3, "my_model": [content[nest]]}, tmp_path / "weights.pth")
    refused(tmp_path / "weights.pth", "its keys are 'epoch', 'my_model'", "save only the weights")


def test_no_dense_numbers(tmp_path):
    torch.save({"conv1.weight": torch.eye(3).to_sparse()}, tmp_path / "weights.pth")
    refused(tmp_path / "weights.pth", "conv1.weight is no dense tensor")


def test_missing_and_unknown_files(tmp_path):
    refused(tmp_path / "absent.pth", "absent.pth: there is no such file or folder")
    (tmp_path / "weights.h5").write_bytes(b"HDF")
    (tmp_path / "weights.tar").write_bytes(b"tar")
    for name in ("weights.h5", "weights.tar"):
        refused(tmp_path / name, "give a .safetensors, .pth, .pth.tar, .ckpt, .pt or .bin file")


def test_damaged_metadata(tmp_path):
    path = tmp_path / "weights.safetensors"
    for text, says in {"{": "damaged", json.dumps(CARD | {"std": [1]}): "std must be"}.items():
        save_file(trained(), path, metadata={"model_card": text})
        refused(path, says, "export it again")


# ---- runs -------------------------------------------------------------------------------------


def save_step(folder, step, value, best=None, average=None, data=CARD):
    def filled(number):
        return {n: torch.full_like(t, number) for n, t in resnet().state_dict().items()}

    state = {"progress": {"best_step": best}, RUN_INFO: {"data": data} if data else {}}
    averages = {} if average is None else {"average": filled(average)}
    checkpoint = Checkpoint(step, state, {"model": filled(value), "optimizer": {}} | averages)
    return Checkpoints(folder / "checkpoints", keep=9).save(checkpoint, best)


def first_value(source) -> float:
    return load_pretrained(source).tensors["conv1.weight"].flatten()[0].item()


def test_run_gives_its_newest_checkpoint_and_its_normalisation(tmp_path):
    save_step(tmp_path, 1, 1)
    save_step(tmp_path, 2, 2)
    loaded = load_pretrained(tmp_path)
    assert loaded.source_text.endswith("step 2")
    assert (loaded.mean, loaded.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert first_value(tmp_path) == first_value(tmp_path / "checkpoints") == 2
    model = resnet()
    fitted(model, tmp_path)
    assert (model.fc.weight == 2).all()


def test_run_gives_its_best_checkpoint_and_the_average(tmp_path):
    best = save_step(tmp_path, 1, 1, best=1, average=5)
    save_step(tmp_path, 2, 2, best=1)
    assert first_value(tmp_path) == 5
    assert load_pretrained(tmp_path).source_text.endswith("step 1, averaged")
    assert first_value(tmp_path / "checkpoints" / "step-00000002") == 2
    assert load_pretrained(tmp_path, use="last").source_text.endswith("step 2")
    (best / "model.safetensors").write_bytes(b"")
    refused(best, best, "is damaged", "another checkpoint")
    said = []
    loaded = load_pretrained(tmp_path, said.append)
    assert loaded.source_text.endswith("step 2") and "is damaged" in said[0]


def test_the_best_checkpoint_is_found_where_a_kill_between_two_renames_left_it(tmp_path):
    best = save_step(tmp_path, 1, 1, best=1)
    save_step(tmp_path, 2, 2, best=1)
    best.rename(best.with_name(f"{best.name}.old"))
    assert first_value(tmp_path) == 1


def test_damaged_newest_checkpoint_is_passed_over_and_said(tmp_path):
    save_step(tmp_path, 1, 1, data=None)
    (save_step(tmp_path, 2, 2) / "state.json").write_bytes(b"{}")
    said = []
    loaded = load_pretrained(tmp_path, said.append)
    assert loaded.source_text.endswith("step 1") and "step-00000002 is damaged" in said[0]
    assert loaded.mean is None and loaded.normalisation(3) is None
    refused(tmp_path / "checkpoints" / "step-00000002", "state.json", "another checkpoint")


def test_folder_without_a_checkpoint(tmp_path):
    refused(tmp_path, tmp_path, "has no checkpoint")


# ---- imagenet ---------------------------------------------------------------------------------


def test_imagenet_from_the_cache(tmp_path, monkeypatch):
    """A file in PyTorch's cache is used without a network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    cached = folder / "resnet18-f37072fd.pth"
    tensors = trained(classes=1000, width=64, stem="imagenet")
    torch.save(tensors, cached)
    loaded = load_imagenet("resnet18")
    assert loaded.mean == (0.485, 0.456, 0.406) and loaded.std == (0.229, 0.224, 0.225)
    model, said = resnet(classes=3, width=64, stem="imagenet"), []
    fit_weights(model, loaded, say=said.append)
    assert len(said) == 1 and said[0].endswith("head of 1000 classes replaced by one of 3")
    assert torch.equal(model.conv1.weight, tensors["conv1.weight"])
    refused("imagenet", "--stem imagenet", model=resnet(classes=3, width=64))
    cached.write_bytes(b"half")
    refused("imagenet", cached, "remove it")


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("imagenet", "resnet50-11ad3fa6.pth"),
        ("DEFAULT", "resnet50-11ad3fa6.pth"),
        ("ResNet50_Weights.IMAGENET1K_V2", "resnet50-11ad3fa6.pth"),
        ("IMAGENET1K_V1", "resnet50-0676ba61.pth"),
        ("ResNet18_Weights.IMAGENET1K_V1", "this model is resnet50"),
        ("IMAGENET1K_V7", "torchvision has IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT for"),
    ],
)
def test_the_names_of_torchvision(source, url, monkeypatch):
    fetched, said = [], []

    def fetch(url, **_):
        fetched.append(url.rpartition("/")[2])
        return {"fc.bias": torch.zeros(1000)}

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetch)
    if not url.endswith(".pth"):
        with pytest.raises(UserError, match=url):
            load_imagenet("resnet50", source)
        return
    weights = load_imagenet("resnet50", source, said.append)
    assert weights.source_text.startswith("ImageNet") and fetched == []
    assert weights.tensors.keys() == {"fc.bias"} and fetched == [url]
    ratio = "0.966" if "11ad" in url else "0.875"
    assert said == [f"published for --image_size 224 --crop_ratio {ratio}"]


def test_the_names_of_torchvision_are_for_its_models():
    argv = ["--model", "test_vit", "--pretrained", "ViT_B_16_Weights.DEFAULT"]
    settings, _ = parse(vit_test.Settings, argv, "")
    with pytest.raises(UserError, match="those of test_vit are timm's: --pretrained published"):
        Pictures(settings, vit_test.build_model, "test_vit").load_published(print)


@pytest.mark.parametrize(
    "name, checked", [("seresnet18-4bb0ce65.pth", True), ("IN22K-vit.g.16-600e.pth.tar", False)]
)
def test_weights_by_url_are_checked_where_their_name_has_a_sum(name, checked, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda url, **how: asked.update(how))
    published._from_url(f"https://example.org/{name}", "--pretrained")
    assert asked["check_hash"] is checked and asked["weights_only"] is True


def test_imagenet_without_a_network(tmp_path, monkeypatch):
    def fail(url, **_):
        raise urllib.error.URLError(OSError(101, "Network is unreachable"))

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, *_, **__: fail(url))
    path = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    refused("imagenet", "Network is unreachable", f"put it at {path}")


def test_imagenet_of_another_architecture():
    settings, _ = parse(Settings, ["--pretrained", "--width", "64"], "")
    assert settings.published_weights == ("torchvision", "resnet50")
    settings, _ = parse(Settings, ["--pretrained", "--width", "32"], "")
    with pytest.raises(UserError, match=r"resnet50w32; there are for --width 64 .* 50, 101, 152$"):
        Pictures(settings, build_model, model_name(settings)).load_published(print)
