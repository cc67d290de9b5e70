"""Checkpoints, exported weights and recipes that earlier revisions wrote still work.

The fixtures beside this file were made by make.py, and are never made again.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from quick_runs import handlers_put_back, quick
from short_runs import write_data

import resnet50_test
import transformer_test
from utils.settings.config import FILE, parse

HERE = Path(__file__).parent
RUNS = sorted(path.parent.name for path in HERE.glob("*/run"))
# Another CPU adds up in another order; after three steps losses are still close.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    write_data(folder)
    return folder


@pytest.fixture
def case(data, tmp_path, monkeypatch) -> Path:
    """Makes an empty folder beside the data the working directory."""
    folder = data / tmp_path.name
    folder.mkdir()
    monkeypatch.chdir(folder)
    quick(monkeypatch)
    with handlers_put_back():
        yield folder


def records(lines: bytes) -> list[dict]:
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_an_earlier_run_can_be_resumed(case, name):
    """Interrupted in its second epoch, it ends as it did then."""
    shutil.copytree(HERE / name / "run", case / "run")
    [state] = (HERE / name).glob("run/checkpoints/*/state.json")
    kept = json.loads(state.read_text())["metrics_bytes"]
    entry = transformer_test if name.startswith("texts") else resnet50_test
    assert entry.main(["--resume", "run"]) == 0
    written = (case / "run/metrics.jsonl").read_bytes()
    assert written[:kept] == (HERE / name / "run/metrics.jsonl").read_bytes()[:kept]
    resumed = records(written[kept:])
    expected = records((HERE / name / "expected.jsonl").read_bytes())
    assert expected
    for ours, theirs in zip(resumed, expected, strict=True):
        assert (ours["step"], ours["split"]) == (theirs["step"], theirs["split"])
        assert theirs.keys() <= ours.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours.get("lambda", 0) == pytest.approx(theirs.get("lambda", 0), rel=TOLERANCE)


def test_earlier_exported_weights_can_be_loaded(case, capfd):
    weights = HERE / "exported" / "model.safetensors"
    recipe = HERE / "tuned" / "best.yaml"
    flags = ["--config", recipe, "--pretrained", weights, "--max_steps", 2, "--output", "run"]
    assert resnet50_test.main([str(flag) for flag in [*flags, "--device", "cpu"]]) == 0
    out = capfd.readouterr().out
    assert f"weights from {weights}" in out and "head" not in out.split("weights from")[1][:80]


def test_an_earlier_recipe_is_still_valid():
    path = HERE / "tuned" / "best.yaml"
    settings, origin = parse(resnet50_test.Settings, ["--config", str(path)], "")
    values = yaml.safe_load(path.read_text())
    assert len(values) > 5
    for name, value in values.items():
        assert (getattr(settings, name), origin[name]) == (value, FILE)
