"""The features of a frozen backbone, computed once: the head is trained as by ordinary runs."""

import json
from pathlib import Path

import pytest
import torch
from quick_runs import handlers_put_back, raise_in_step
from safetensors.torch import load_file, save_file

import transformer_test
import vit_test

CPU = "--device cpu --threads 1 --cache_dir cache"
PICTURES = f"--dataset shapes --subset 150 --depth 18 --width 4 -b 16 {CPU}"
VIT = f"--dataset shapes --subset 150 --patch_size 16 --dim 16 --layers 1 --ffn 16 -b 16 {CPU}"
TEXTS = f"--dataset headlines --subset 150 --dim 16 --layers 1 --heads 2 --ffn 16 -b 16 {CPU}"
PLAIN = "--crop_padding 0 --hflip 0"
FROZEN = (
    "--epochs 3 --pretrained first --freeze_backbone --head_lr 0.1 --log_every 1 --val_fraction 0.2"
)
OFTEN = "--accumulation_steps 2 --ema_decay 0.9 --best_by f1_macro --class_sampler balanced"


@pytest.fixture
def run(run_resnet, capfd):
    """run(text, main) -> what these flags print."""

    def start(text: str, main=None) -> str:
        with handlers_put_back():
            code = run_resnet(text) if main is None else main(text.split())
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    return start


def results(folder: str) -> tuple[dict, list]:
    """The last weights; the losses of every log line and evaluation."""
    last = max(Path(folder, "checkpoints").glob("step-*"))
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return load_file(last / "model.safetensors"), [
        [line[k] for k in ("step", "loss")] for line in lines
    ]


@pytest.mark.parametrize(
    ("flags", "main", "further"),
    [
        (f"{PICTURES} {PLAIN}", None, OFTEN),
        (f"{VIT} {PLAIN} --heads 2", vit_test.main, "--drop_last --optimizer sgd"),
        (TEXTS, transformer_test.main, f"{OFTEN} --pooling mean"),
        (f"{TEXTS} --batch_tokens 160", transformer_test.main, "--sched plateau"),
    ],
    ids=["resnet", "vit", "texts", "tokens"],
)
def test_the_head_is_trained_as_without(run, monkeypatch, flags, main, further):
    pooling = "--pooling mean" if "pooling" in further else ""
    run(f"{flags} {pooling} --epochs 1 --output first", main)
    flags = f"{flags} {FROZEN} {further}"
    assert "computed once, in " in run(f"{flags} --output once", main)
    assert " from cache/features-" in run(f"{flags} --output again", main)
    with monkeypatch.context() as patch:
        patch.setattr("utils.runs.prepare.with_features", lambda run, task, *_: task)
        run(f"{flags} --output each", main)
    (weights, losses), (expected, each) = results("once"), results("each")
    assert losses == results("again")[1] and len(losses) > 15
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(each), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    for name in ("evaluated.csv", "splits.csv"):
        once, other = (Path(run, name).read_text().splitlines() for run in ("once", "each"))
        assert [row.split(",")[:3] for row in once] == [row.split(",")[:3] for row in other]


def test_a_resumed_run_goes_on_to_the_bit(run, run_resnet, monkeypatch):
    run(f"{PICTURES} --epochs 1 --output first")
    flags = f"{PICTURES} {PLAIN} {FROZEN} --ema_decay 0.9 --output"
    run(f"{flags} whole")
    (file,) = Path("cache").glob("features-*")
    other = {name: rows + rows.std() for name, rows in load_file(file).items()}
    save_file(other, file)  # as of a model whose code was changed
    with monkeypatch.context() as patch:
        raise_in_step(patch, 13, 2)
        assert run_resnet(f"{flags} parts") == 130
    file.unlink()
    assert "computed once" in run("--resume parts")
    (weights, losses), (expected, whole) = results("parts"), results("whole")
    assert losses == whole and all(torch.equal(weights[k], expected[k]) for k in expected)
    assert "test accuracy" in run("--resume parts --eval_only --no_report")


def test_why_there_are_none_is_said(run, monkeypatch):
    run(f"{PICTURES} --epochs 1 --output first")
    flags = f"{PICTURES} --pretrained first --freeze_backbone --max_steps 1 --output"
    assert "note: with --crop_padding 0 --hflip 0 the frozen" in run(f"{flags} one")
    out = run(f"{flags} two {PLAIN} --mixup 0.2 --flip_test")
    assert "note: with --mixup none --eval_views none the frozen" in out
    monkeypatch.setattr("utils.runs.frozen_features.available_memory", lambda: 1e4)
    out = run(f"{flags} three {PLAIN}")
    assert "note: features of 0 GB are too many for the memory: the frozen" in out
    assert "features of 250 samples" not in out and not [*Path("cache").glob("features-*")]
