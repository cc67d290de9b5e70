"""Flags whose package is missing are refused before anything else is done."""

import sys

import pytest

from resnet50_test import Settings
from utils.errors import UserError
from utils.settings.config import parse


def read(*argv) -> Settings:
    return parse(Settings, [str(word) for word in argv], "")[0]


@pytest.mark.parametrize("name", ["onnx", "onnxscript"])
def test_an_export_to_onnx(name, make_run, monkeypatch):
    run = make_run()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as told:
        read("--resume", run, "--export", "onnx")
    assert str(told.value) == f"--export onnx needs one more package: pip install {name}"
    assert read("--resume", run, "--export", "safetensors").export == "safetensors"


def test_wandb(make_run, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as told:
        read("--wandb", "offline")
    assert str(told.value) == "--wandb offline needs one more package: pip install wandb"
    # Where it is not used, it is not missed.
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert read("--wandb", "offline").wandb == "offline"
    monkeypatch.delenv("WANDB_MODE")
    assert read("--wandb", "offline", "--dry_run").dry_run
