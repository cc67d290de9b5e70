"""A third entry: with settings, a model and a name alone it can do what the other two can."""

import json

import pytest
from PIL import Image
from quick_runs import handlers_put_back, quick

import transformer_test
from tests import third_entry
from utils.entry import lost_peer_line, run_entry

FLAGS = "--dataset shapes -b 50 --device cpu --log_every 4 --fused none --lr 0.01"


@pytest.fixture
def run(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(*flags) -> int:
        with handlers_put_back():
            return third_entry.main([str(flag) for flag in flags])

    return run


def test_a_third_entry_trains_resumes_and_is_used(run, tmp_path, capsys):
    flags = [*FLAGS.split(), "--output", "first"]
    assert run(*flags, "--epochs", 1) == 0
    assert run("--resume", "first", "--epochs", 2) == 0
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert (summary["model"], summary["entry"]) == ("perceptron8", "third_entry.py")
    assert (summary["epochs"], summary["steps"]) == (2, 24)
    assert run("--resume", "first", "--eval_only") == 0

    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    assert run("--resume", "first", "--predict", "black.png") == 0
    assert len((tmp_path / "first" / "predictions.csv").read_text().splitlines()) == 2
    assert run("--resume", "first", "--export", "safetensors") == 0
    assert (tmp_path / "first" / "export" / "model.safetensors").stat().st_size

    capsys.readouterr()
    more = ["--epochs", 1, "--pretrained", "first", "--freeze_backbone"]
    assert run(*FLAGS.split(), "--output", "second", *more) == 0
    assert "weights from first, step 24" in capsys.readouterr().out
    assert run(*flags[:-1], "third", "--hidden", 4, *more) == 2
    assert "give weights of the same architecture" in capsys.readouterr().err
    assert run(*flags[:-1], "fourth", "--pretrained", "imagenet") == 2
    assert (
        "no weights are published for perceptron8; give a run or a file" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("entry", "flag", "goes_on"),
    [
        (third_entry, "--train_file", ": it belongs to transformer_test.py"),
        (transformer_test, "--img_size", ": it belongs to resnet50_test.py and vit_test.py"),
        (third_entry, "--hiden", ", did you mean --hidden?"),
        (third_entry, "--qqqq", "; see --help"),
    ],
)
def test_an_unknown_flag_that_another_entry_has(capsys, entry, flag, goes_on):
    with handlers_put_back():
        assert run_entry(entry.Settings, None, "", [flag, "3"]) == 2
    assert capsys.readouterr().err == f"error: unknown flag {flag}{goes_on}\n"


def test_a_lost_process_is_told_with_the_cause():
    """Perhaps nobody is gone: an interface of GLOO_SOCKET_IFNAME may not exist."""
    line = lost_peer_line(1, RuntimeError("Unable to find address for: eth9\nmore"))
    assert line.startswith("rank 1: ") and line.endswith(": Unable to find address for: eth9")
    assert lost_peer_line(0, RuntimeError()).endswith(": RuntimeError")
