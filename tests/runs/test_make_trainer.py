"""The facts of a run that an engine is told."""

from types import SimpleNamespace

import pytest
import torch
from toy import CPU, network

from utils.fused.dropout import Dropout
from utils.runs.make_trainer import run_facts
from utils.training.controls import Freeze
from utils.training.objective import Precision

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
    "grad_checkpointing": False,
}


def facts(
    model=None,
    device=CPU,
    precision="fp32",
    processes=1,
    accumulation=1,
    until=None,
    shapes_vary=False,
    **settings,
):
    settings = SimpleNamespace(**PLAIN_SETTINGS | settings)
    freeze = None if until is None else Freeze(network(), ("6",), *until)
    task = SimpleNamespace(
        train=SimpleNamespace(accumulation=accumulation), shapes_vary=shapes_vary
    )
    ready = SimpleNamespace(task=task, model=model or Dropout(0.1), freeze=freeze)
    return vars(run_facts(settings, Precision(precision, device), processes, ready))


@pytest.mark.parametrize(
    ("run", "differs"),
    [
        ({}, {}),
        ({"device": CUDA, "precision": "bf16"}, {"device": CUDA}),
        ({"compile": True}, {"compiled": True}),
        ({"shapes_vary": True}, {"shapes_vary": True}),
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
        ({"until": (1,)}, {"unfreezes": True}),
        ({"until": ()}, {}),  # frozen for the whole run
    ],
)
def test_facts_are_those_of_the_run(run, differs):
    assert facts(**run) == PLAIN | differs
