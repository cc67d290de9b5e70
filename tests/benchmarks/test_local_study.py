"""benchmarks/local_study.py: what its rules send, its files, and a run on synthetic pictures."""

import json

import pytest

from benchmarks import local_study
from benchmarks.local_study import LocalResult, LocalRunner, Run, foretold, main, options_of

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


def test_a_study_of_local_steps_makes_its_files(tmp_path, monkeypatch):
    """With figures in place of the runs."""

    def train(self, runs, jobs):
        for run in runs:
            test, sent = (80.0, 1.0) if run.label == "ddp" else (79.0, 0.25)
            distances = [[0.5, 0.02], [1.0, 0.01]]
            self.results[run] = LocalResult(None, test + run.seed, 1.0, 0.5, 0.6, sent, distances)

    monkeypatch.setattr(LocalRunner, "train", train)
    assert main(["--output", str(tmp_path), *FLAGS, "--rules", "constant-4"]) == 0
    table = (tmp_path / "table.md").read_text().splitlines()
    assert table[2:] == [
        "| ddp | 100.0 % | 1.00 | 0.5000 | 0.6000 | 81.50 (81.00 to 82.00) |  |",
        "| constant-4 | 25.0 % | 1.00 | 0.5000 | 0.6000 | 80.50 (80.00 to 81.00) | -1.00 ± 0.00 |",
    ]
    assert list(json.loads((tmp_path / "summary.json").read_text())["rules"]) == [
        "ddp",
        "constant-4",
    ]
    assert (tmp_path / "distance.png").stat().st_size


@pytest.mark.slow
def test_a_run_of_the_study_sends_what_is_foretold(tmp_path):
    options = options_of(["--output", str(tmp_path), *FLAGS])
    runner = LocalRunner(tmp_path, local_study.common_flags(options))
    run = Run("qsr-1", local_study.rules_of(options)["qsr-1"], 1)
    runner.train([run], jobs=1)
    result = runner.results[run]
    assert result.sent_of_ddp == pytest.approx(foretold(options)["qsr-1"])
    assert result.distances[-1][0] == 1.0 and result.distances[-1][1] > 0
    # Started again, the study has it.
    assert LocalRunner(tmp_path, local_study.common_flags(options)).results == {run: result}
