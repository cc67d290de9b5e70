"""Searches over the real entries, on the synthetic sets."""

import csv
import functools
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE, wait_until
from PIL import Image
from quick_runs import handlers_put_back, quick

from benchmarks import tuning

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ["--dataset", "shapes", "--depth", "18", "--width", "4", "--bs", "16"]
TEXTS = ["--dataset", "headlines", "--layers", "1", "--dim", "16", "--heads", "2", "--ffn", "32"]
SHORT = ["--device", "cpu", "--threads", "1", "--jobs", "1", "--rungs", "2", "--trials", "2"]


def begin(name, folder, *flags):
    script = ROOT / "tuning" / f"{name}_tuning.sh"
    return subprocess.Popen(
        ["bash", str(script), *SHORT, *flags, "--output", "study"], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip


def end(process):
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


def rows(folder):
    with open(folder / "study" / "trials.csv") as file:
        return {row["trial"]: row for row in csv.DictReader(file)}


CASES = {
    "resnet50": [*PICTURES, "--subset", "300", "--epochs", "2", "--confirm", "1", "--seed", "3",
                 "--mixup", "0.2", "--log_every", "1"],
    "transformer": [*TEXTS, "--subset", "0.2", "--epochs", "2", "--confirm", "0"],
}  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """searched(name) -> (folder, output) of an undisturbed search of CASES, made once."""

    @functools.cache
    def search(name):
        folder = tmp_path_factory.mktemp(name)
        return folder, end(begin(name, folder, *CASES[name]))

    return search


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_recipe_reproduces_its_score_to_the_bit(name, searched, monkeypatch):
    folder, out = searched(name)
    assert "recipe: study/best.yaml" in out
    monkeypatch.chdir(folder)
    quick(monkeypatch)
    head = (folder / "study" / "best.yaml").read_text().splitlines()
    command = next(line for line in head if line.startswith("#   python "))
    script, *words = shlex.split(command.removeprefix("#   python "))
    words[words.index("best.yaml")] = "study/best.yaml"
    entry = importlib.import_module(script.removesuffix(".py"))
    with handlers_put_back():
        assert entry.main([*words, "--output", "again"]) == 0

    def validation(run):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["split"] == "val"][-1]

    report = json.loads((folder / "study" / "report.json").read_text())
    last = sorted((folder / f"study/trials/{report['handed_over']:04}").glob("rung?"))[-1]
    assert validation(folder / "again") == validation(last)
    test = [p for p in folder.glob("study/trials/*/*/metrics.jsonl") if '"test"' in p.read_text()]
    assert test == []
    # And the recipe as it is.
    with handlers_put_back():
        assert entry.main(["--config", "study/best.yaml", "--dry_run"]) == 0


@pytest.mark.slow
def test_a_search_killed_and_stopped_within_runs(tmp_path, searched):
    """It has the same trials, to the bit, as an undisturbed one."""
    whole, _ = searched("resnet50")

    def lines():
        paths = tmp_path.glob("study/trials/*/*/metrics.jsonl")
        return sum(len(path.read_text().splitlines()) for path in paths)

    for steps, signum in ((7, signal.SIGTERM), (15, signal.SIGKILL)):
        before = lines()
        process = begin("resnet50", tmp_path, *CASES["resnet50"])
        wait_until(lambda: lines() >= before + steps)  # noqa: B023
        process.send_signal(signum)
        process.communicate()
        assert process.returncode != 0  # the search had not ended
    end(begin("resnet50", tmp_path, *CASES["resnet50"]))

    def results(folder):
        return {
            number: {key: value for key, value in row.items() if key != "seconds"}
            for number, row in rows(folder).items()
        }

    assert results(tmp_path) == results(whole)


@pytest.mark.slow
def test_missing_data_is_reported_in_one_line(tmp_path):
    process = begin("resnet50", tmp_path, "--dataset", "imagefolder", "--data_dir", "nowhere")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and err.count("\n") == 1 and "nowhere" in err


@pytest.mark.slow
def test_a_search_on_a_folder_of_pictures(tmp_path, run_resnet):
    """--dataset follows from the folder, and is in the recipe."""
    for split, count in (("train", 24), ("val", 8)):
        for number in range(count):
            path = tmp_path / "pictures" / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (200 * (number % 2), number, 50)).save(path)
    words = ["--data_dir", "pictures", "--val_is_validation", "--image_size", "32", *PICTURES[2:]]
    words += ["--subset", "1.0", "--epochs", "1", "--recipe_epochs", "1", "--confirm", "0"]
    words += ["--trials", "1"]
    end(begin("resnet50", tmp_path, *words))
    recipe = yaml.safe_load((tmp_path / "study" / "best.yaml").read_text())
    assert recipe["dataset"] == "imagefolder" and recipe["val_is_validation"]
    flags = "--config study/best.yaml --no_final_test --device cpu --output run"
    assert run_resnet(flags) == 0


def test_a_run_may_do_without_the_test_set(run_resnet, capsys):
    words = " ".join([*PICTURES, "--subset 50 --epochs 1 --output run --device cpu"])
    assert run_resnet(f"{words} --no_final_test") == 2
    assert "--no_final_test needs a validation split" in capsys.readouterr().err
    assert run_resnet(f"{words} --no_final_test --val_fraction 0.1") == 0
    assert "validation accuracy" in capsys.readouterr().out
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["test_accuracy"] is None
    assert run_resnet("--resume run") == 0
    assert "not tested" in capsys.readouterr().out


@pytest.mark.slow
def test_the_benchmark(tmp_path, capsys):
    """A tiny one runs, can be continued, and compares."""
    words = ["--seeds", "1", "--trials", "1", "--epochs", "1", "--train_samples", "100", "--width",
             "4", "--batch", "16", "--rungs", "2", "--precision", "fp32", "--pruned_trials", "2",
             "--again", "1", "--jobs", "2", "--flags=--confirm 0", "--output",
             str(tmp_path)]  # fmt: skip
    for _ in range(2):
        assert tuning.main(words) == 0
    result = json.loads((tmp_path / "benchmark.json").read_text())
    summary, (found,) = result["summary"], result["searches"].values()
    assert len(summary["differences"]) == 1 and result["machine"]["optuna"]
    assert sum(found["pruned"]["states"].values()) == 2
    one, other = found["pruned"]["again"], found["random"]["again"]
    assert len(one) == len(other) == 1 and summary["mean_difference"] == one[0] - other[0]
    assert found["pruned"]["samples"] >= found["pruned"]["curve"][-2][0]
    assert (tmp_path / "benchmark.png").stat().st_size
    capsys.readouterr()
    assert tuning.main([*words, "--trials", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --trials")
