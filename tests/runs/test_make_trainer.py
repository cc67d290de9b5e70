"""The facts of a run that an engine is told."""

from types import SimpleNamespace

import pytest
import torch
from toy import CPU, network

from utils.errors import UserError
from utils.fused.dropout import Dropout
from utils.runs.make_trainer import _progressive_resizing, run_facts
from utils.training.controls import Freeze
from utils.training.objective import Precision
from utils.training.progressive_resizing import ProgressiveResizing

CUDA = torch.device("cuda", 0)
PLAIN = {
    "device": CPU, "compiled": False, "shapes_vary": False, "scales_loss": False, "processes": 1,
    "accumulation": 1, "capturable": True, "learns_mixing": False, "unfreezes": False,
    "recomputes": False, "external_model": False,
}  # fmt: skip

PLAIN_SETTINGS = {
    "compile": False,
    "mixup": "none",
    "optimizer": "adamw",
    "lookahead_k": None,
    "image_size_schedule": None,
    "batch_tokens": None,
    "grad_checkpointing": False,
}


def facts(
    model=None,
    device=CPU,
    precision="fp32",
    processes=1,
    accumulation=1,
    until=None,
    **settings,
):
    settings = SimpleNamespace(**PLAIN_SETTINGS | settings)
    freeze = None if until is None else Freeze(network(), ("6",), *until)
    task = SimpleNamespace(train=SimpleNamespace(accumulation=accumulation))
    ready = SimpleNamespace(task=task, model=model or Dropout(0.1), freeze=freeze)
    return vars(run_facts(settings, Precision(precision, device), processes, ready))


@pytest.mark.parametrize(
    ("run", "differs"),
    [
        ({}, {}),
        ({"device": CUDA, "precision": "bf16"}, {"device": CUDA}),
        ({"compile": True}, {"compiled": True}),
        ({"batch_tokens": 4096}, {"shapes_vary": True}),
        ({"image_size_schedule": "24:0.5"}, {"shapes_vary": True}),
        ({"precision": "fp16"}, {"scales_loss": True}),
        ({"processes": 2}, {"processes": 2}),
        ({"accumulation": 4}, {"accumulation": 4}),
        ({"optimizer": "sgd"}, {}),
        ({"optimizer": "muon"}, {}),
        ({"optimizer": "ngd"}, {}),
        ({"lookahead_k": 5}, {"capturable": False}),
        ({"mixup": "meta", "meta_form": "policy"}, {}),
        ({"mixup": "meta", "meta_form": "sample"}, {"learns_mixing": True}),
        ({"mixup": "fixed"}, {}),
        ({"grad_checkpointing": True}, {"recomputes": True}),
        ({"model": network()}, {"external_model": True}),
        ({"model": SimpleNamespace(backbone=network())}, {"external_model": True}),
        ({"until": (1,)}, {"unfreezes": True}),
        ({"until": ()}, {}),  # frozen for the whole run
    ],
)
def test_facts_are_those_of_the_run(run, differs):
    assert facts(**run) == PLAIN | differs


def test_smaller_pictures_in_whole_epochs_for_a_network_that_takes_them():
    def found(text, epochs, model=None):
        run = SimpleNamespace(
            settings=SimpleNamespace(image_size_schedule=text), model_name="net",
            console=SimpleNamespace(say=said.append), precision=Precision("fp32", CPU),
        )  # fmt: skip
        task = SimpleNamespace(usual_sample=lambda: torch.zeros(1, 3, 32, 32))
        ready = SimpleNamespace(task=task, model=model or network())
        return _progressive_resizing(run, ready, epochs)

    said = []
    assert found(None, 3) is None and not said
    assert found("24:0.29", 100) == ProgressiveResizing(24, 29)  # 0.29 * 100 < 29
    assert found("24:0.5", 4.5) == ProgressiveResizing(24, 2)
    assert found("24:0.9", 1) == ProgressiveResizing(24, 0)  # an epoch of full size is left
    assert said[0] == "pictures of 24 pixels in 29 of 100 epochs, then of 32"
    with pytest.raises(UserError, match="have 32 pixels already"):
        found("32:0.5", 3)
    with pytest.raises(UserError, match="net takes no pictures of 24 pixels"):
        found("24:0.5", 3, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32**2, 2)))
