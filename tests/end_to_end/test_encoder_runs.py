"""transformer_test.py with an encoder of transformers, as a user runs it."""

import csv
import shutil
import signal
from pathlib import Path

import pytest
import small_encoders
import torch
from quick_runs import raise_in_step
from safetensors.torch import load_file

import transformer_test

pytestmark = pytest.mark.usefixtures("own_folder")
FLAGS = [
    "--dataset", "headlines", "--subset", "96", "--max_len", "16", "--device", "cpu", "--threads",
    "1", "--cache_dir", "cache", "--batch_size", "16", "--epochs", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return str(small_encoders.write_encoder(tmp_path_factory.mktemp("own") / "bert"))


@pytest.fixture
def run(capfd):
    """run(flags) -> (exit code, what it said)."""

    def start(*arguments) -> tuple[int, str]:
        code = transformer_test.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err and "Warning" not in err, err
        return code, out + err

    return start


def weights(run: str) -> dict[str, torch.Tensor]:
    step = max(Path(run, "checkpoints").iterdir())
    return load_file(step / "model.safetensors")


def test_trains_resumes_and_predicts_without_the_folder(run, encoder, tmp_path, monkeypatch):
    """The run has all that is needed of the encoder, and resumes to the bit."""
    own = shutil.copytree(encoder, tmp_path / "encoder")
    start = [*FLAGS, "--model", own, "--pretrained"]
    code, said = run(*start, "--output", "whole", "--tokenizer", "bpe")
    assert f"--tokenizer has no effect: --model {own} brings its own" in said
    assert code == 0 and "note: usual for pretrained encoders: --optimizer adamw" in said
    with monkeypatch.context() as patch:
        raise_in_step(patch, 5, signal.SIGTERM)
        assert run(*start, "--output", "cut")[0] == 143
    shutil.rmtree(own)
    assert run("--resume", "cut")[0] == 0
    whole, cut = weights("whole"), weights("cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[n], cut[n]) for n in whole)
    (tmp_path / "new.csv").write_text("text\nstocks fall\nteam wins the cup\n")
    assert run("--resume", "cut", "--predict", tmp_path / "new.csv")[0] == 0
    with open("cut/predictions.csv", encoding="utf-8-sig") as file:
        assert len(list(csv.DictReader(file))) == 2
    assert run("--resume", "cut", "--export", "safetensors")[0] == 0
    code, said = run(*FLAGS, "--pretrained", "cut", "--output", "other")
    assert code == 2 and f"are of --model {own}; give that too" in said


@pytest.mark.parametrize(
    "more",
    [
        ["--freeze_backbone", "--ngd"],
        ["--lora", "2", "--optimizer", "muon", "--mixup", "fixed", "--batch_tokens", "99"],
        [
            "--freeze_backbone",
            "--unfreeze_epoch",
            "1",
            "--layer_decay",
            "0.8",
            "--batch_tokens",
            "99",
        ],
        ["--grad_checkpointing", "--meta_learning", "--precision", "bf16"],
    ],
    ids=["frozen", "adapters", "unfrozen", "mixed"],
)
def test_ways_of_training(run, encoder, more):
    """What is frozen stays, what is trained moves."""
    code, said = run(*FLAGS, "--model", encoder, "--pretrained", *more, "--output", "one")
    assert code == 0, said
    assert ("default rate is for training from nothing" in said) == ("muon" in more)
    before, after = load_file(f"{encoder}/model.safetensors"), weights("one")
    assert ("features of 196 samples computed once" in said) == (more[-1] == "--ngd")
    frozen = "--lora" in more or ("--unfreeze_epoch" not in more and "--freeze_backbone" in more)
    for name, tensor in before.items():
        if not name.startswith("pooler."):
            own = f"backbone.{name}"
            own = own if own in after else own.replace(".weight", ".base_layer.weight")
            own = own if own in after else own.replace(".bias", ".base_layer.bias")
            assert torch.equal(after[own], tensor) == frozen, name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layers", "3"], "has its own sizes"),
        (["--mixup", "fixed", "--mixup_at", "embeddings"], "is for --model transformer"),
        (["--lora", "2", "--freeze_backbone"], "leave --freeze_backbone out"),
        (["--max_len", "100"], "reads at most 63 tokens"),
    ],
)
def test_refused(run, encoder, flags, words):
    code, said = run(*FLAGS, "--model", encoder, "--pretrained", *flags)
    assert code == 2 and words in said


def test_an_encoder_given_as_weights_alone(run, encoder):
    code, said = run(*FLAGS, "--pretrained", encoder)
    assert code == 2 and f"give --model {encoder} --pretrained" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["roberta", "mpnet"])  # without padding, with it
def test_onnx(run, tmp_path, kind):
    folder = small_encoders.write_encoder(tmp_path / "encoder", kind)
    assert run(*FLAGS, "--model", folder, "--pretrained", "--output", "one")[0] == 0
    code, said = run("--resume", "one", "--export", "onnx")
    assert code == 0 and "of PyTorch's probabilities" in said
