"""What --engine ort excludes is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from settings_of_pictures import refused, settings_of

import vit_test
from utils.errors import UserError
from utils.runs.advice import phase_advice
from utils.settings.config import parse
from utils.training.objective import Precision

ORT = ("--engine", "ort")


@pytest.mark.parametrize(
    "flags",
    [
        "--device cuda",
        "--precision bf16",
        "--precision fp16",
        "--compile",
        "--cuda_graphs on",
        "--fused speed",
        "--auto_batch",
        "--mixup meta",
        "--drop_path 0.1",
        "--strategy fsdp --distributed",
        "--sync_bn --distributed",
    ],
)
def test_what_training_excludes(flags):
    words = flags.split()
    text = refused(*ORT, *words)
    assert text.startswith(words[0]) and "--engine ort" in text
    assert settings_of(*words).engine == "torch"


def test_gradient_checkpointing_is_excluded():
    with pytest.raises(
        UserError, match=r"^--grad_checkpointing cannot be combined with --engine ort"
    ):
        parse(vit_test.Settings, [*ORT, "--grad_checkpointing"], "")


@pytest.mark.parametrize(
    "flags", ["", "--precision fp32", "--mixup 0.2 --ema_decay 0.9", "--strategy ddp --distributed",
              "--strategy local"],
)  # fmt: skip
def test_what_works(flags):
    assert settings_of(*ORT, *flags.split()).engine == "ort"


def test_no_advice_to_take_a_flag_that_it_excludes(monkeypatch):
    monkeypatch.setattr("utils.runs.advice.is_faster_in_bf16", lambda device: True)
    precision = Precision("fp32", torch.device("cpu"))
    loader = SimpleNamespace(workers=0, batch_flag="--batch_size")
    assert "forward_backward" in phase_advice(settings_of(), precision, loader)
    assert "forward_backward" not in phase_advice(settings_of(*ORT), precision, loader)


@pytest.mark.parametrize(
    ("epochs", "eval_every", "advice"),
    [
        (5, 2, "evaluate less often by --eval_every 4"),
        (4, 2, None),  # one evaluation would be saved
        (1, 1, None),
        (90, 0, None),  # the test set at the end only
    ],
)
def test_advice_to_evaluate_less_often_only_where_it_helps(epochs, eval_every, advice):
    precision = Precision("bf16", torch.device("cpu"))
    settings = settings_of("--epochs", str(epochs), "--eval_every", str(eval_every))
    loader = SimpleNamespace(workers=0, batch_flag="--batch_size")
    assert phase_advice(settings, precision, loader).get("evaluation") == advice
