"""Starting from other weights, predictions and exports: each result is computed again by hand, with
torchvision's ResNet where the architecture is the same."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data.images.test_mnist import Imitation
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import resnet18

from resnet50_test import main
from utils.data.images.image_data import Form
from utils.models.resnet import ResNet

pytestmark = pytest.mark.usefixtures("own_folder")

ENGINE = ["--device", "cpu", "--threads", "1"]
# A small rate: a model that is certain of one class for every picture would show no differences.
MODEL = ["--depth", "18", "--lr", "0.002", *ENGINE]
TINY = [*MODEL, "--width", "4"]
REAL = [*MODEL, "--stem", "imagenet"]  # torchvision's resnet18, for pictures of 32 pixels
SHAPES = ["--dataset", "shapes", "--subset", "64", "--max_steps", "2", "--eval_every", "0"]
CLASSES = ("ant", "bee", "cat")


def pictures(root: str, size=16, count=8) -> list[str]:
    """A tree of three classes; returns the flags that name it."""
    rng = np.random.default_rng(size)
    for split, number in (("train", count), ("test", 2)):
        for label, name in enumerate(CLASSES):
            folder = Path(root, split, name)
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = rng.integers(0, 156, (size, size, 3)) + 99 * np.eye(3, dtype=int)[label]
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return ["--dataset", "imagefolder", "--data_dir", root, "--image_size", str(size), "-b", "8"]


def checkpoint(run: str, step: int | None = None) -> Path:
    found = sorted(Path(run, "checkpoints").glob("step-*"))
    return found[-1] if step is None else Path(run, "checkpoints", f"step-{step:08}")


def weights(run: str, step: int | None = None, name="model.safetensors") -> dict:
    return load_file(checkpoint(run, step) / name)


def card(run: str) -> dict:
    return json.loads((checkpoint(run) / "state.json").read_text())["settings"]["data"]


def is_equal(one: dict, other: dict, names) -> list[bool]:
    return [torch.equal(one[name], other[name]) for name in names]


def without_head(tensors: dict) -> list[str]:
    return [name for name in tensors if not name.startswith("fc.")]


def probabilities(model, run: str, paths, mode="RGB") -> torch.Tensor:
    """(n, classes), by plain PyTorch, of pictures that have the model's size already."""
    told = card(run)
    images = np.stack([np.asarray(Image.open(path).convert(mode)) for path in paths])
    inputs = torch.from_numpy(images.reshape(*images.shape[:3], -1)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(told[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        return model.eval()((inputs - mean) / std).softmax(1)


def assert_predicted(path: str, expected: torch.Tensor, paths, run: str) -> None:
    """Asserts that the CSV file has the `expected` probabilities, in the order of `paths`."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [str(path) for path in paths]
    best, classes = expected.max(1)
    assert best.min() < 0.99, "the model is too certain to show anything"
    names = card(run)["classes"]
    assert [row["predicted"] for row in rows] == [names[i] for i in classes]
    found = torch.tensor([float(row["probability"]) for row in rows])
    torch.testing.assert_close(found, best, rtol=0, atol=2e-6)
    found = torch.tensor([[float(row[f"p_{name}"]) for name in names] for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


# ---- starting from other weights --------------------------------------------------------------


def test_from_a_run_and_from_its_export(works):
    works(*SHAPES, *TINY, "--ema_decay", "0.5", "--output", "first")
    works("--resume", "first", "--export", "safetensors", *ENGINE)
    data = [*pictures("pictures"), "--max_steps", "1", "--freeze_backbone", "--eval_every", "0"]
    sources = {"run": "first", "file": "first/export/model.safetensors"}
    for output, source in sources.items():
        said = works(*data, *TINY, "--pretrained", source, "--output", output)
        assert f"{source}" in said and "head of 10 classes replaced by one of 3" in said
        # Pictures are normalised as the pretrained model's were, not by their own mean and std.
        assert [card(output)[n] for n in ("mean", "std")] == [card("first")[n] for n in
                                                              ("mean", "std")]  # fmt: skip
        average = weights("first", name="average.safetensors")
        assert all(is_equal(weights(output), average, without_head(average)))
    assert all(is_equal(weights("run"), weights("file"), weights("run")))
    assert not all(is_equal(average, weights("first"), without_head(average)))


def test_a_head_of_the_same_classes_is_kept(works):
    works(*SHAPES, *TINY, "--output", "first")
    # With such a small rate a step is lost in rounding.
    said = works(
        *SHAPES, *TINY, "--max_steps", "1", "--lr", "1e-30", "--wd", "0", "--pretrained", "first",
        "--output", "second",
    )  # fmt: skip
    assert "replaced" not in said
    assert all(is_equal(weights("first"), weights("second"), ["fc.weight", "fc.bias"]))


@pytest.mark.slow
def test_frozen_weights_of_torchvision_stay_and_the_head_trains(works):
    torch.manual_seed(3)
    torch.save(resnet18().state_dict(), "weights.pth")
    data = [*pictures("pictures", 32), "--max_steps", "2", "--save_every", "1", "--eval_every", "0"]
    said = works(
        *data, *REAL, "--pretrained", "weights.pth", "--freeze_backbone", "--wd", "0.1",
        "--ema_decay", "0.9", "--output", "run",
    )  # fmt: skip
    assert "weights.pth: head of 1000 classes replaced by one of 3" in said
    before = torch.load("weights.pth", weights_only=True)
    first, last = weights("run", 1), weights("run", 2)
    # With BatchNorm's statistics and counters; with decay 0.1 a trained weight would shrink.
    assert all(is_equal(before, last, without_head(before)))
    average = weights("run", 2, "average.safetensors")
    for name in without_head(before):
        torch.testing.assert_close(average[name], before[name], rtol=1e-6, atol=1e-7)
    assert not any(is_equal(first, last, ["fc.weight", "fc.bias"]))
    state = load_file(checkpoint("run") / "optimizer.safetensors")
    assert all(name.startswith("fc.") for name in state) and state


def test_an_unfrozen_backbone_is_trained(works):
    # Close to its zero a branch has gradients that get lost in rounding.
    works(*SHAPES, *TINY, "--no_zero_init_residual", "--output", "first")
    data = [*pictures("pictures"), "--epochs", "2", "--save_every", "3"]  # 3 steps an epoch
    said = works(
        *data, *TINY, "--pretrained", "first", "--freeze_backbone", "--unfreeze_epoch", "1",
        "--output", "run",
    )  # fmt: skip
    assert "after 1 epoch: from here on all layers train" in said
    before, names = weights("first"), without_head(weights("first"))
    assert all(is_equal(before, weights("run", 3), names))
    assert not any(is_equal(before, weights("run", 6), names))
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    (event,) = [record for record in map(json.loads, lines) if record["split"] == "event"]
    assert event["step"] == 3 and event["event"] == "unfrozen"


def test_colour_weights_serve_gray_pictures(works, monkeypatch, tmp_path):
    works(*SHAPES, *TINY, "--output", "first")
    Imitation("mnist", monkeypatch).write(tmp_path / "data" / "MNIST" / "raw")
    said = works(
        "--dataset", "mnist", "--data_dir", "data", "-b", "8", "--max_steps", "1", *TINY,
        "--freeze_backbone", "--pretrained", "first", "--output", "gray", "--eval_every", "0",
    )  # fmt: skip
    assert "conv1.weight summed over its 3 colours, for gray pictures" in said
    colour, gray = weights("first")["conv1.weight"], weights("gray")["conv1.weight"]
    torch.testing.assert_close(gray, colour.sum(1, keepdim=True))
    assert card("gray")["mean"] == pytest.approx([sum(card("first")["mean"]) / 3])


# ---- using what was trained -------------------------------------------------------------------


@pytest.mark.slow
def test_predictions_and_exports_agree_with_torchvision(works):
    data = pictures("pictures", 32)
    works(*data, *REAL, "--max_steps", "2", "--ema_decay", "0.5", "--output", "run")
    paths = sorted(Path("pictures/test").rglob("*.png"))
    model = resnet18(num_classes=3)
    model.load_state_dict(weights("run", name="average.safetensors"))
    expected = probabilities(model, "run", paths)
    said = works("--resume", "run", "--predict", "pictures/test", *ENGINE)
    assert "averaged weights" in said and "6 predictions: run/predictions.csv" in said
    assert_predicted("run/predictions.csv", expected, paths, "run")
    works("--resume", "run", "--predict", paths[3], "--predictions", "one.csv", "-b", "1", *ENGINE)
    assert_predicted("one.csv", expected[3:4], paths[3:4], "run")

    works("--resume", "run", "--export", "safetensors", *ENGINE)
    exported = resnet18(num_classes=3)
    exported.load_state_dict(load_file("run/export/model.safetensors"))
    torch.testing.assert_close(probabilities(exported, "run", paths), expected, rtol=0, atol=0)
    # The last weights, which are not those that are evaluated, give other results.
    model.load_state_dict(weights("run"))
    assert not torch.allclose(probabilities(model, "run", paths), expected, atol=1e-4)


@pytest.mark.slow
def test_onnx_takes_pictures_as_they_are(works):
    onnxruntime = pytest.importorskip("onnxruntime")
    works(*pictures("pictures"), *TINY, "--max_steps", "2", "--output", "run")
    works("--resume", "run", "--export", "onnx", *ENGINE)
    paths = sorted(Path("pictures/test").rglob("*.png"))
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    session = onnxruntime.InferenceSession("run/export/model.onnx")
    form = json.loads(session.get_modelmeta().custom_metadata_map["form"])
    assert form == dataclasses.asdict(Form())  # for the code of docs/pictures.md
    (found,) = session.run(["probabilities"], {"images": images})
    model = ResNet(18, 3, 4)
    model.load_state_dict(weights("run"))
    expected = probabilities(model, "run", paths)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-4)


def test_files_that_are_no_pictures_are_left_out_of_predictions(works, capfd):
    works(*pictures("pictures"), *TINY, "--max_steps", "1", "--output", "run")
    folder = Path("pictures/test/bee")
    (folder / "0a.png").write_text("no picture")
    predict = ["--resume", "run", "--predict", str(folder), *ENGINE]
    assert main(predict) == 2
    error = capfd.readouterr().err
    assert "0a.png is not a readable picture" in error and "--on_bad skip" in error
    assert not Path("run/predictions.csv").exists()
    said = works(*predict, "--on_bad", "skip")
    assert "1 bad file left out" in said and "0a.png" in said
    model = ResNet(18, 3, 4)
    model.load_state_dict(weights("run"))
    paths = [folder / "0.png", folder / "1.png"]
    assert_predicted("run/predictions.csv", probabilities(model, "run", paths), paths, "run")


def test_predictions_of_a_gray_model(works, monkeypatch, tmp_path):
    Imitation("mnist", monkeypatch).write(tmp_path / "data" / "MNIST" / "raw")
    data = ["--dataset", "mnist", "--data_dir", "data", "-b", "8", "--max_steps", "2"]
    works(*data, *TINY, "--output", "run")
    Path("new").mkdir()
    rng, paths = np.random.default_rng(0), []
    for number, shape in enumerate([(28, 28), (28, 28, 3)]):  # gray, RGB
        paths.append(Path("new", f"{number}.png"))
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(paths[-1])
    works("--resume", "run", "--predict", "new", *ENGINE)
    model = ResNet(18, 10, 4, channels=1)
    model.load_state_dict(weights("run"))
    expected = probabilities(model, "run", paths, mode="L")
    assert_predicted("run/predictions.csv", expected, paths, "run")
