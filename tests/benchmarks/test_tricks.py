"""benchmarks/tricks.py: each trick adds to those before it, and a whole study on synthetic data."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from quick_runs import handlers_put_back, quick

import resnet50_test
from benchmarks import studies, tricks
from benchmarks.tricks import PLAIN, TRICKS, figures_of, flags_of, main, options_of, table


def settings(flags: list[str]) -> dict[str, str]:
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_each_trick_adds_to_those_before_it(tmp_path):
    ways = flags_of(options_of(["--output", str(tmp_path), "--lr", "0.3", "--ngd_lr", "0.04"]))
    assert list(ways) == [trick for trick, _ in TRICKS]
    of = [settings(flags) for flags in ways.values()]
    for (_, added), before, after in zip(TRICKS[1:], of, of[1:], strict=False):
        changed = {name for name in after if after[name] != before.get(name)}
        assert changed == {f"--{name}" for name in added}
    assert of[0]["--lr"] == "0.3" and of[-1]["--lr"] == "0.04" and of[-1]["--mixup"] == "auto"


def test_speeds_are_compared_seed_by_seed():
    found = figures_of({
        PLAIN: [{"seconds": 10.0, "accuracy": 50.0}, {"seconds": 20.0, "accuracy": 60.0}],
        "trick": [{"seconds": 5.0, "accuracy": 51.0}, {"seconds": 5.0, "accuracy": 62.0}],
    })  # fmt: skip
    assert found["trick"]["faster"] == [2.0, 4.0] and found[PLAIN]["faster"] == [1.0, 1.0]
    text = table({"tricks": found})
    assert "| + trick | 5.0 | 3.00 (2.00 to 4.00) | 56.50 (51.00 to 62.00) |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_impossible_settings_are_refused(tmp_path, capsys):
    assert main(["--output", str(tmp_path), "--seeds", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --seeds")


def starting_by(run, monkeypatch) -> None:
    """The study starts runs by this function; `platform` keeps the real one."""
    standin = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(tricks, "subprocess", standin)


def test_other_flags_train_anew(tmp_path, monkeypatch):
    trained = []

    def run(words, **_):
        folder = Path(words[words.index("--output") + 1])
        folder.mkdir(parents=True)
        epochs = int(words[words.index("--epochs") + 1])
        figures = {"status": "finished", "seconds_training": epochs, "test_accuracy": 50}
        (folder / "summary.json").write_text(json.dumps(figures))
        trained.append(epochs)
        return subprocess.CompletedProcess(words, 0)

    starting_by(run, monkeypatch)
    plain = {"seconds": 9.0, "accuracy": 40.0}
    monkeypatch.setattr(tricks, "train_plainly", lambda options, seed: plain)
    for epochs in ("8", "16", "16"):
        assert main(["--output", str(tmp_path), "--epochs", epochs, "--seeds", "1"]) == 0
    assert trained == [8] * len(TRICKS) + [16] * len(TRICKS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {summary["tricks"][trick]["seconds"][0] for trick, _ in TRICKS} == {16}


def in_this_process(words, **_):
    """subprocess.run of the entry, whose output comes with that of the study."""
    with handlers_put_back():
        return subprocess.CompletedProcess(words, resnet50_test.main(words[2:]), stderr="")


def test_a_record_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"trick": "one"}\n{"tri')
    assert studies.read_records(tmp_path / "results.jsonl") == [{"trick": "one"}]
    assert studies.read_records(tmp_path / "none.jsonl") == []


@pytest.mark.slow
def test_a_whole_study(tmp_path, capsys, monkeypatch):
    arguments = [
        "--output", str(tmp_path), "--samples", "128", "--epochs", "1", "--width", "4",
        "--batch", "32", "--seeds", "1", "--workers", "0",
    ]  # fmt: skip
    starting_by(in_this_process, monkeypatch)
    quick(monkeypatch)
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["tricks"]) == [PLAIN, *(trick for trick, _ in TRICKS)]
    for name in ("table.md", "tricks.png"):
        assert (tmp_path / name).stat().st_size
    assert "seed 0, mixing: " in capsys.readouterr().out
    # Started again, it trains nothing: the results are there.
    monkeypatch.setattr(tricks, "train", None)
    monkeypatch.setattr(tricks, "train_plainly", None)
    assert main(arguments) == 0
