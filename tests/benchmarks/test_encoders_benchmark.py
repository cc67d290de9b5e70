"""A small study of ways of training an encoder, and a small comparison with the Trainer."""

import csv
import json

import pytest
import small_encoders

from benchmarks import encoders

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Of a benchmark with a small encoder and texts told apart at a glance."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, number in (("train", 96), ("test", 40)):
        with open(folder / f"{split}.csv", "w", newline="") as file:
            for index in range(number):
                word = ["war", "goal", "bank", "chip"][index % 4]
                csv.writer(file).writerow([index % 4 + 1, f"{word} and more {index}"])
    model = small_encoders.write_encoder(tmp_path / "bert", max_position_embeddings=256)
    return [
        *("--data_dir", str(folder), "--model", str(model), "--output", str(tmp_path / "out")),
        *("--cache_dir", str(tmp_path / "cache")),
    ]


def test_a_study(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "WAYS", {"frozen": encoders.WAYS["frozen"]})
    argv = ["study", *flags, "--sizes", "32", "--seeds", "1"]
    assert encoders.main(argv) == 0
    (row,) = json.loads((tmp_path / "out/summary.json").read_text())["rows"]
    assert row["texts"] == 32 and len(row["ways"]["frozen"]["accuracy"]) == 1
    assert "| 32 |" in (tmp_path / "out/table.md").read_text()


def test_against_the_trainer(flags, tmp_path):
    assert encoders.main(["trainer", *flags, "--texts", "64", "--repetitions", "1"]) == 0
    results = json.loads((tmp_path / "out/summary.json").read_text())["results"]
    assert all(one[0]["rate"] > 0 and one[0]["accuracy"] <= 100 for one in results.values())
    assert len(results) == 3
