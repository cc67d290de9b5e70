"""curves.png is drawn from whatever metrics.jsonl holds."""

import pytest
from PIL import Image

from utils.reporting.plots import draw_curves


def step(epoch, **figures):
    return {"split": "train", "average_over": "steps", "epoch": epoch, "lr": 0.1} | figures


def end(split, epoch, **figures):
    return {"split": split, "epoch": epoch} | figures


WHOLE_RUN = [
    step(0.5, loss=2.0, accuracy=20.0),
    end("train", 1.0, loss=1.8, accuracy=30.0, average_over="epoch"),
    end("val", 1.0, loss=1.7, accuracy=33.0),
    end("test", 1.0, loss=1.6, accuracy=35.0),
]
RECORDS = {
    "empty": [],
    "whole": WHOLE_RUN,
    "steps alone": [step(0.5, loss=2.0, accuracy=20.0)],
    "diverged": [step(0.5, loss=None, accuracy=10.0), end("test", 1.0, loss=None, accuracy=10.0)],
    "keys missing": [{"split": "train", "epoch": 1.0}, {"split": "test", "epoch": 1.0}],
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS.keys())
@pytest.mark.filterwarnings("error")
def test_picture_of_a_sensible_size(tmp_path, records):
    path = tmp_path / "curves.png"
    draw_curves(records, path, "resnet18 on shapes, sgd")
    with Image.open(path) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert 800 <= picture.width <= 4000 and 300 <= picture.height <= 2000
        assert picture.convert("L").getextrema() != (255, 255)
    assert list(tmp_path.iterdir()) == [path]


def test_replaces_the_picture_before(tmp_path):
    path = tmp_path / "curves.png"
    draw_curves([], path, "title")
    empty = path.read_bytes()
    draw_curves(WHOLE_RUN, path, "title")
    assert path.read_bytes() != empty
