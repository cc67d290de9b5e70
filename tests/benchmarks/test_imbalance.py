"""The data of the study on unequal classes, and a small study."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from benchmarks import imbalance
from benchmarks.mixup_study import Runner


@pytest.fixture
def data(tmp_path):
    """Pictures of three classes, and texts of four, told apart at a glance."""
    for split, number in (("train", 40), ("test", 6)):
        for label in range(3):
            place = tmp_path / "data" / split / f"class{label}"
            place.mkdir(parents=True)
            for index in range(number):
                pixels = np.full((8, 8, 3), index, np.uint8)
                pixels[..., label] = 200
                Image.fromarray(pixels).save(place / f"{index:02}.png")
    folder = tmp_path / "data" / "ag_news_csv"
    folder.mkdir()
    for split, number in (("train", 100), ("test", 50)):
        with open(folder / f"{split}.csv", "w", newline="") as file:
            for index in range(4 * number):
                word = ["war", "goal", "bank", "chip"][index % 4]
                csv.writer(file).writerow([index % 4 + 1, f"{word} {index}", "and more"])
    return tmp_path / "data"


def test_the_data_become_unequal(data, tmp_path):
    imbalance.link_pictures(data, tmp_path / "tail", ratio=10)
    counts = [len([*(tmp_path / "tail/train" / f"class{label}").iterdir()]) for label in range(3)]
    assert counts == [40, 13, 4]
    assert len([*(tmp_path / "tail/test/class2").iterdir()]) == 6
    imbalance.cut_texts(data / "ag_news_csv", tmp_path / "texts")
    for name, expected in (("train", [100, 29, 11, 3]), ("test", [50, 14, 6, 1])):
        rows = [*csv.reader((tmp_path / f"texts/{name}.csv").read_text().splitlines())]
        assert [sum(row[0] == str(label) for row in rows) for label in (1, 2, 3, 4)] == expected


def test_a_small_study(data, tmp_path, monkeypatch, capsys):
    """One run is trained; all other figures are made up."""
    methods, train = {"none": "", "sampler": "--class_sampler balanced"}, Runner._train

    def one_of_them(self, run):
        made_up = imbalance.Measured(None, 50.0, 1.0, f1=40.0 + run.seed)
        return train(self, run) if (run.label, run.seed) == ("sampler", 1) else made_up

    monkeypatch.setattr(Runner, "_train", one_of_them)
    monkeypatch.setattr(imbalance, "METHODS", methods)
    common = ["--data_dir", str(data), "--output", str(tmp_path / "study"), "--seeds", "2"]
    common += ["--cache_dir", str(tmp_path / "cache"), "--only", "texts", "--text_epochs", "1"]
    assert imbalance.main(common) == 0
    summary = json.loads((tmp_path / "study/summary.json").read_text())
    assert {*summary["data"]["texts"]} == {*methods}
    assert len(summary["data"]["texts"]["none"]["f1"]) == 2
    assert (tmp_path / "study/f1.png").read_bytes().startswith(b"\x89PNG")
    assert "| texts | `--class_sampler balanced` |" in capsys.readouterr().out
