"""Which engine serves a run, and why another one cannot."""

from types import SimpleNamespace

import pytest
import torch
from toy import CPU, facts_of, make_trainer, use_engine

from utils.engines import cuda_graphs, engine
from utils.engines.choose import ENGINES, choose_engine
from utils.training.train_step import TrainStep


def chosen(trainer, wanted="auto", deterministic=False, **options):
    """(name of the engine, messages)."""
    chosen_engine, notes = choose_engine(
        facts_of(trainer, **options), cuda_graphs=wanted, deterministic=deterministic
    )
    names = {path.rpartition(":")[2]: name for name, path in ENGINES.items()}
    return names[type(chosen_engine).__name__], notes


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
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda device: device.type)
    monkeypatch.setattr(cuda_graphs, "GraphedStep", lambda *args: args)
    monkeypatch.setattr(engine, "TimedSteps", lambda *args: args[:1])
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
    name, said = chosen(trainer, wanted, compiled=True)
    reason = "--compile makes kernels of its own" if gpu else "there is no GPU"
    assert name == "compile"
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
    engine, _ = choose_engine(
        facts_of(trainer, compiled=True), cuda_graphs="off", deterministic=False
    )
    called = wrapped(engine, trainer)
    assert called is not trainer.steps.model and called._orig_mod is trainer.steps.model
    assert facts_of(trainer).device == CPU


def test_graphs_of_models_that_recompute_or_are_others(tmp_path):
    trainer = on_a_gpu(make_trainer(tmp_path))
    for wanted in ("on", "auto"):
        assert chosen(trainer, wanted, recomputes=True)[0] == "eager"
    assert "--grad_checkpointing" in chosen(trainer, "on", recomputes=True)[1][0]
    assert chosen(trainer, "auto", external_model=True) == ("eager", [])
    assert chosen(trainer, "on", external_model=True)[0] == "cuda_graphs"
