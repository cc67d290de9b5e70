"""Whole runs with --engine ort."""

import json
from pathlib import Path

import pytest
import torch
from quick_runs import handlers_put_back, quick
from safetensors.torch import load_file

import resnet50_test
import transformer_test
import vit_test

RESNET = (
    "--dataset shapes --depth 18 --width 4 --subset 96 --batch_size 16 --epochs 2 "
    "--epochs_for_sched 2 --no_report --log_every 2"
)
VIT = (
    "--dataset shapes --layers 1 --dim 16 --heads 2 --ffn 32 --subset 96 --batch_size 16 "
    "--epochs 2 --epochs_for_sched 2 --no_report --log_every 2"
)
TEXTS = (
    "--dataset headlines --layers 2 --dim 16 --heads 2 --ffn 32 --subset 96 --batch_size 16 "
    "--epochs 2 --epochs_for_sched 2 --no_report --log_every 2"
)
ENTRIES = {
    "resnet": (resnet50_test.main, RESNET),
    "vit": (vit_test.main, VIT),
    "texts": (transformer_test.main, TEXTS),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with handlers_put_back():
        yield


def run(entry: str, output: str, flags: str = "", *, engine: str = "ort") -> Path:
    main, common = ENTRIES[entry]
    words = f"{common} --engine {engine} --output {output} {flags}".split()
    assert main(words) == 0
    return Path(output)


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def assert_near(one: Path, other: Path, tolerance: float) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("entry", "flags"),
    [
        ("resnet", "--mixup 0.2 --accumulation_steps 2 --ema_decay 0.9"),
        ("resnet", "--batch_size 20"),  # a smaller batch at the end
        ("vit", "--optimizer ngd"),
        ("vit", "--optimizer lamb --cutmix_alpha 1"),
        ("texts", "--dropout 0 --mixup 0.2"),
        ("vit", "--strategy local --local_workers 2"),
        ("resnet", "--lookahead_k 2 --clip 0.1"),
    ],
)
def test_a_run_is_that_of_pytorch(entry, flags):
    flags += " --max_steps 6"
    assert_near(run(entry, "ours", flags), run(entry, "theirs", flags, engine="torch"), 2e-3)


@pytest.mark.parametrize(
    ("entry", "flags"),
    [("vit", "--drop_rate 0.2"), ("texts", "--dropout 0.2 --token_dropout 0.1"), ("resnet", "")],
)
def test_a_resumed_run_is_the_uninterrupted_one(entry, flags, capsys):
    """To the bit, dropout included; stopped within an epoch."""
    whole = run(entry, "whole", flags)
    run(entry, "parts", f"{flags} --max_steps 4")
    main, _ = ENTRIES[entry]
    assert main(["--resume", "parts", "--max_steps", "none"]) == 0
    ours, theirs = weights(Path("parts")), weights(whole)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert "ONNX Runtime: gradients" in capsys.readouterr().out
    losses = [
        [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").open()][-1]
        for folder in (whole, Path("parts"))
    ]
    assert losses[0] == losses[1]
