"""Which engine serves a run, and why another one cannot."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from toy import CPU, facts_of, make_trainer, use_engine

from utils.distributed.strategies.base import Strategy
from utils.engines import engine
from utils.engines.engine import Compile, CudaGraphs, Engine, choose_engine
from utils.mixup.mixing import Mixing
from utils.models.transformer import Transformer
from utils.packed import pack
from utils.reporting.console import Console
from utils.training.train_step import TrainStep


def chosen(trainer, wanted="auto", deterministic=False, **options):
    """(class of the engine, messages)."""
    chosen_engine, notes = choose_engine(
        facts_of(trainer, **options), cuda_graphs=wanted, deterministic=deterministic
    )
    return type(chosen_engine), notes


def on_a_gpu(trainer):
    """Pretends that the run's device is a GPU."""
    gpu = SimpleNamespace(device=torch.device("cuda"))
    trainer.steps.precision = trainer.steps.parts.precision = gpu
    return trainer


def test_the_reason_is_said(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    use_engine(trainer)
    assert "--cuda_graphs: not used, because there is no GPU" in capsys.readouterr().out
    for wanted in ("auto", "off"):
        use_engine(trainer, wanted)
    assert capsys.readouterr().out == ""
    assert type(trainer.steps) is TrainStep


@pytest.mark.parametrize(
    ("wanted", "deterministic", "asked"),
    [("on", False, True), ("on", True, True), ("auto", False, False), ("auto", True, None),
     ("off", False, None)],
)  # fmt: skip
def test_who_gets_graphs(tmp_path, monkeypatch, wanted, deterministic, asked):
    """asked: of the GraphedStep that is made; None: there is none."""
    monkeypatch.setattr(engine, "CudaRecorder", lambda device: device.type)
    monkeypatch.setattr(engine, "GraphedStep", lambda *args: args)
    monkeypatch.setattr(engine, "TrainStep", lambda *args: args)
    trainer = on_a_gpu(make_trainer(tmp_path))
    parts = trainer.steps.parts
    use_engine(trainer, wanted, deterministic=deterministic)
    if asked is None:
        assert trainer.steps == (parts,)
    else:
        assert trainer.steps[0] is parts and trainer.steps[-2:] == ("cuda", asked)


@pytest.mark.parametrize("wanted", ["on", "auto", "off"])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_compiled_model_has_no_graphs(tmp_path, gpu, wanted):
    """Its steps are taken as those of any other model."""
    trainer = make_trainer(tmp_path)
    trainer = on_a_gpu(trainer) if gpu else trainer
    kind, said = chosen(trainer, wanted, compiled=True)
    reason = "--compile makes kernels of its own" if gpu else "there is no GPU"
    assert kind is Compile
    assert said == ([f"--cuda_graphs: not used, because {reason}"] if wanted == "on" else [])


def wrapped(engine, trainer):
    """What the objective would call."""
    return engine.wrap(trainer.steps.strategy, trainer.log.console)


def test_the_model_is_called_as_it_is_unless_it_is_compiled(tmp_path):
    trainer = make_trainer(tmp_path)
    for wanted in ("on", "auto", "off"):
        for made in (trainer, on_a_gpu(make_trainer(tmp_path))):
            engine, _ = choose_engine(facts_of(made), cuda_graphs=wanted, deterministic=False)
            assert wrapped(engine, trainer) is trainer.steps.model
    assert facts_of(trainer).device == CPU


@pytest.mark.parametrize("texts", [False, True], ids=["pictures", "texts"])
def test_a_run_is_compiled_once(monkeypatch, texts):
    """Whatever the sizes of its batches: of texts too, and of the last batch, or the first after a
    resume, of pictures."""
    compiled, calls, build = [], [], torch.compile

    def backend(graph, _):
        compiled.append(graph)
        return lambda *given: calls.append(1) or graph(*given)

    monkeypatch.setattr(torch, "compile", partial(build, backend=backend))
    if texts:
        model = Transformer(30, 3, 1, 8, 1, 8, 9, dropout=0.0)
        tokens, lengths = np.arange(1, 20), [[5, 2, 1], [4, 4], [9, 1, 1, 3], [2, 3, 1]]
        batches = [pack(tokens, np.zeros(len(n), int), np.array(n), CPU) for n in lengths]
    else:
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        batches = [torch.randn(n, 1, 2, 2) for n in (6, 6, 2, 1, 6)]
    called = Compile().wrap(Strategy(model), Console(silent=True))
    for batch in batches:
        torch.testing.assert_close(called(batch), model(batch))
    assert len(compiled) == 1 and len(calls) == (4 if texts else 3)
    called.eval()  # the unmixed part of a batch, evaluated without gradients
    with torch.no_grad():
        called(batches[0])
    assert len(compiled) == 1 and not model.training


def test_graphs_of_models_that_recompute_or_are_others(tmp_path):
    trainer = on_a_gpu(make_trainer(tmp_path))
    for wanted in ("on", "auto"):
        assert chosen(trainer, wanted, recomputes=True)[0] is Engine
    assert "--grad_checkpointing" in chosen(trainer, "on", recomputes=True)[1][0]
    assert chosen(trainer, "auto", external_model=True) == (Engine, [])
    assert chosen(trainer, "on", external_model=True)[0] is CudaGraphs


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
        ({"shapes_vary": True}, "--batch_tokens"),
        ({"scales_loss": True}, "--precision bf16"),
        ({"processes": 2}, "several processes"),
    ],
)
def test_which_runs_graphs_cannot_serve(tmp_path, changes, reason):
    assert reason in reason_for(make_trainer(tmp_path), **changes)
