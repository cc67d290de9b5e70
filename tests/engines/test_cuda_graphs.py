"""Which steps a CUDA graph cannot hold."""

import dataclasses

import pytest
import torch
from toy import facts_of, make_trainer

from utils.engines.cuda_graphs import CudaGraphs
from utils.mixup.mixing import Mixing


def reason_for(trainer, **changes) -> str | None:
    """why_not, if the run were on a GPU."""
    facts = dataclasses.replace(facts_of(trainer), device=torch.device("cuda"))
    return CudaGraphs().why_not(dataclasses.replace(facts, **changes))


def mixing(**options):
    return Mixing(alpha=0.5, block=4, height=8, width=8, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"optimizer": "adamw", "ema_decay": 0.9, "mixing": mixing()}, None),
        ({"accumulation": 2}, "accumulated"),
        ({"optimizer": "muon"}, None),
        ({"optimizer": "ngd"}, None),
        ({"optimizer_options": {"lookahead_k": 5}}, "--lookahead_k"),
        ({"freeze_until": 1}, "--unfreeze_epoch"),
        ({"mixing": mixing(meta_form="policy", clean_samples=4)}, None),
        ({"mixing": mixing(meta_form="sample", clean_samples=4)}, "--meta_form sample"),
    ],
)
def test_which_trainers_graphs_cannot_serve(tmp_path, options, reason):
    said = reason_for(make_trainer(tmp_path, **options))
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "there is no GPU"),
        ({"compiled": True}, "--compile"),
        ({"texts": True}, "texts"),
        ({"scales_loss": True}, "--precision bf16"),
        ({"processes": 2}, "several processes"),
    ],
)
def test_which_runs_graphs_cannot_serve(tmp_path, changes, reason):
    assert reason in reason_for(make_trainer(tmp_path), **changes)
