"""benchmarks/mixup_study.py: its figures, and a whole study on synthetic pictures."""

import json

import pytest

from benchmarks import mixup_study
from benchmarks.mixup_study import Result, Runner, main, table
from benchmarks.studies import paired

FLAGS = [
    "--epochs", "1", "--width", "4", "--batch", "16", "--train_samples", "48", "--precision",
    "fp32", "--seeds", "2", "--tuning_seeds", "1", "--alphas", "0.2", "1.0",
]  # fmt: skip


def test_mean_and_error_of_paired_differences():
    found = paired([3.0, 5.0, 7.0], [2.0, 3.0, 4.0])  # 1, 2, 3
    assert found["mean"] == 2 and found["seeds"] == 3
    assert found["half"] == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_the_table():
    one = {"flags": "--mixup 1", "test_accuracy": [1.0, 2.0], "mean": 1.5}
    text = table(
        {
            "methods": {
                "none": one | {"flags": "", "minus": {}},
                "fixed": one | {"minus": {"none": {"mean": 0.5, "half": 0.25}}},
            }
        }
    )
    assert "| fixed | `--mixup 1` | 1.50 (1.00 to 2.00) | +0.50 ± 0.25 |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_impossible_settings_are_refused(tmp_path, capsys):
    for flags in (["--methods", "some"], ["--variant", "none=--mixup 1"], ["--seeds", "1"]):
        assert main(["--output", str(tmp_path / "study"), *flags]) == 2
        assert capsys.readouterr().err.startswith(f"error: {flags[0]}")


@pytest.mark.slow
def test_a_whole_study(tmp_path, capsys, monkeypatch):
    """A run to tune and a final one are trained; all other accuracies are made up."""
    train, trained = Runner._train, {("meta-alpha0.2", 1000), ("meta", 2)}

    def two_of_them(self, run):
        made_up = Result(10.0, 10.0 * run.seed, 1.0)
        return train(self, run) if (run.label, run.seed) in trained else made_up

    monkeypatch.setattr(Runner, "_train", two_of_them)
    arguments = ["--output", str(tmp_path), *FLAGS, "--methods", "none,meta"]
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["methods"]) == {"none", "meta"}
    assert len(summary["tuning"]) == 2
    for name in ("table.md", "accuracy.png", "alphas.png"):
        assert (tmp_path / name).stat().st_size
    said = capsys.readouterr().out
    assert "[4/4]" in said
    # Started again, it trains nothing: the results are there.
    monkeypatch.setattr(mixup_study.subprocess, "Popen", None)
    assert main(arguments) == 0
    # Nor if a result was not recorded, though its run had finished.
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["run"]["label"] != "meta"]
    (tmp_path / "results.jsonl").write_text("".join(lines))
    assert main(arguments) == 0
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
