"""--eval_views: figures apart from the plain ones, which stay as they are; predictions."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_use_of_models import TINY, assert_predicted, card, pictures, weights

from utils.models.resnet import ResNet

pytestmark = pytest.mark.usefixtures("own_folder")

FLAGS = [*TINY, "--epochs", "2", "--no_zero_init_residual", "--ema_decay", "0.5"]
LINE = r"averaged with mirror images \(--eval_views mirror\): loss ([\d.]+), accuracy ([\d.]+) %"
PLAIN = r"test accuracy ([\d.]+) % \("


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def metrics(run: str) -> list[dict]:
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    measured = ("samples_per_second", "time_share", "peak_memory_bytes")
    return [{k: v for k, v in json.loads(line).items() if k not in measured} for line in lines]


def answers(run: str, paths, name: str, mirrored: bool) -> torch.Tensor:
    """Probabilities (n, classes) in float64 by the weights in the newest checkpoint."""
    told = card(run)
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    images = images[:, :, ::-1].copy() if mirrored else images
    mean, std = (
        torch.tensor(told[n], dtype=torch.float64).view(1, 3, 1, 1) for n in ("mean", "std")
    )
    inputs = (torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255 - mean) / std
    model = ResNet(18, 3, 4)
    model.load_state_dict(weights(run, name=name), strict=False)  # an average without counters
    with torch.no_grad():
        return model.double().eval()(inputs).softmax(1)


def test_both_figures_are_given(works):
    data = pictures("pictures")
    plain = works(*data, *FLAGS, "--output", "plain")
    said = works(*data, *FLAGS, "--flip_test", "--output", "run")
    told, other = summary("run"), summary("plain")
    assert {*told} - {*other} == {"eval_views", "views_test_loss", "views_test_accuracy"}
    for key in ("test_loss", "test_accuracy", "test_samples", "train_loss"):
        assert told[key] == other[key]
    assert metrics("run") == metrics("plain")
    assert re.findall(PLAIN, said) == re.findall(PLAIN, plain)
    [(loss, accuracy)] = re.findall(LINE, said)
    assert float(loss) == pytest.approx(told["views_test_loss"], abs=1e-4)
    assert float(accuracy) == pytest.approx(told["views_test_accuracy"], abs=0.01)

    paths = sorted(Path("pictures/test").glob("*/*.png"))
    labels = [card("run")["classes"].index(path.parent.name) for path in paths]
    both = [answers("run", paths, "average.safetensors", mirrored) for mirrored in (False, True)]
    expected = (both[0] + both[1]) / 2
    of_labels = expected[range(len(paths)), labels]
    assert told["views_test_loss"] == pytest.approx(-of_labels.log().mean().item(), rel=1e-4)
    correct = (expected.argmax(1) == torch.tensor(labels)).double().mean().item()
    assert told["views_test_accuracy"] == pytest.approx(100 * correct)
    assert told["views_test_loss"] != told["test_loss"]

    again = works("--resume", "plain", "--eval_only", "--flip_test")
    assert re.findall(LINE, again) == [(loss, accuracy)]
    assert re.findall(PLAIN, again) == re.findall(PLAIN, said)
    assert not re.findall(LINE, works("--resume", "plain", "--eval_only"))

    predicted = works("--resume", "plain", "--predict", "pictures/test", "--flip_test")
    assert "6 predictions: " in predicted
    assert ", averaged with mirror images (--eval_views mirror)" in predicted
    assert_predicted("plain/predictions.csv", expected.float(), paths, "plain")
    predicted = works("--resume", "plain", "--predict", "pictures/test")
    assert "6 predictions: " in predicted
    assert_predicted("plain/predictions.csv", both[0].float(), paths, "plain")


def test_the_best_weights_are_chosen_by_the_plain_figure(works):
    data = [*pictures("pictures"), "--val_fraction", "0.25", "--lr", "0.05", "--epochs", "3"]
    for flag, output in (("--no_flip_test", "plain"), ("--flip_test", "run")):
        said = works(*data, *TINY, *data[-4:], flag, "--report", "--output", output)
    told, other = summary("run"), summary("plain")
    new = {f"{of}views_test_{one}" for of in ("", "best_") for one in ("loss", "accuracy")}
    new |= {"eval_views"}
    assert {*told} - {*other} == new
    for key in ("best_epoch", "best_val_accuracy", "best_test_loss", "test_loss"):
        assert told[key] == other[key]
    assert metrics("run") == metrics("plain")
    assert len(re.findall(LINE, said)) == 2
    assert (
        Path("run/report/confusion.csv").read_text()
        == Path("plain/report/confusion.csv").read_text()
    )


def test_it_is_no_flag_of_texts():
    import transformer_test

    assert transformer_test.main(["--flip_test"]) == 2
