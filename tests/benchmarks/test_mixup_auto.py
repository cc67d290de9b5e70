"""benchmarks/mixup_auto.py: the regret, and a whole study on synthetic data."""

import json

import pytest

from benchmarks import mixup_study
from benchmarks.mixup_auto import METHODS, comparison, main, setting_of, table
from benchmarks.mixup_study import Result, Runner


def figures(**accuracy) -> dict[str, list[float]]:
    return {label: accuracy.get(f"m{label.replace('.', '')}", [50.0] * 4) for label in METHODS}


def test_one_half_of_the_seeds_chooses_and_the_other_judges():
    # 0.1 is best with the first two seeds, though 1 is with the others.
    accuracy = figures(m01=[60, 60, 51, 53], m1=[40, 40, 70, 70], mauto=[0, 0, 52, 53])
    seconds = {label: [2.0] * 4 for label in METHODS} | {"auto": [4.0, 1.0, 2.0, 2.0]}
    found = comparison(accuracy, seconds, choosing=2)
    assert found["best"] == "0.1" and found["mean"]["0.1"] == 52
    assert found["regret"]["auto"]["mean"] == -0.5 and found["regret"]["0.1"]["mean"] == 0
    assert found["regret"]["1"]["mean"] == -18
    assert found["time"] == pytest.approx(1.0)


def test_the_table():
    one = comparison(figures(), {label: [1.0] * 4 for label in METHODS}, choosing=2)
    regrets = dict.fromkeys(METHODS, 0.25)
    text = table({"settings": {"9x9": one}, "mean_regret": regrets, "worst_regret": regrets})
    assert "| 9x9 | none | 50.00 |" in text and "+0.00 ± 0.00 | 1.00 |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_settings():
    assert setting_of("10x2")[1:] == (False, 10, 2)
    assert setting_of("texts:10x2")[1:] == (True, 10, 2)


def test_impossible_settings_are_refused(tmp_path, capsys):
    for flags in (["--settings", "10"], ["--settings", "axb"], ["--judging", "1"]):
        assert main(["--output", str(tmp_path / "study"), *flags]) == 2
        assert capsys.readouterr().err.startswith(f"error: {flags[0]}")


@pytest.mark.slow
def test_a_whole_study(tmp_path, capsys, monkeypatch):
    """Two methods are trained with the first seed; all other accuracies are made up."""
    train = Runner._train

    def first_seed(self, run):
        trains = run.seed == 1 and run.label in ("0.5", "auto")
        return train(self, run) if trains else Result(None, 10.0 * run.seed, 1.0)

    monkeypatch.setattr(Runner, "_train", first_seed)
    arguments = [
        "--output", str(tmp_path), "--settings", "64x1", "texts:64x1", "--choosing", "1",
        "--judging", "2", "--width", "4", "--batch", "16", "--flags=--no_zero_init_residual",
    ]  # fmt: skip
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["settings"]) == {"64x1", "texts:64x1"}
    for name in ("table.md", "regret.png"):
        assert (tmp_path / name).stat().st_size
    assert "[15/15]" in capsys.readouterr().out
    # Started again, it trains nothing: the results are there.
    monkeypatch.setattr(mixup_study.subprocess, "Popen", None)
    assert main(arguments) == 0
