"""benchmarks/local_study.py: what its rules send, and a whole study on synthetic pictures."""

import json

import pytest

from benchmarks import mixup_study
from benchmarks.local_study import foretold, main, options_of

FLAGS = ["--epochs", "1", "--width", "1", "--train_samples", "64", "--batch", "4", "--seeds", "2"]


def test_the_bytes_of_the_whole_study_are_foretold(tmp_path):
    shares = foretold(options_of(["--output", str(tmp_path)]))
    rounded = {label: round(100 * share, 1) for label, share in shares.items()}
    assert rounded == {
        "ddp": 100.0, "constant-4": 25.0, "qsr-0.25": 20.8, "qsr-1": 16.1, "qsr-2.2": 9.4,
    }  # fmt: skip


def test_unknown_rules_are_refused(tmp_path, capsys):
    assert main(["--output", str(tmp_path), "--rules", "qsr"]) == 2
    assert "'qsr' is not one of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_study_of_local_steps(tmp_path, monkeypatch, capsys):
    flags = ["--output", str(tmp_path), *FLAGS, "--rules", "qsr-1"]
    assert main(flags) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["rules"]) == ["ddp", "qsr-1"]
    for one in summary["rules"].values():
        assert one["sent_of_ddp"] == pytest.approx(one["foretold"])
    assert "[4/4]" in capsys.readouterr().out
    for name in ("table.md", "distance.png"):
        assert (tmp_path / name).stat().st_size
    # Started again, it trains nothing: the results are there.
    monkeypatch.setattr(mixup_study.subprocess, "Popen", None)
    assert main(flags) == 0
