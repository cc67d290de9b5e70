"""Local steps over several processes (`--strategy local`)."""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
import toy
from local_runs import assert_same_checkpoint, double_network, parameters_of
from torch import nn

from benchmarks.collectives import Collectives, per_step
from utils.checkpoints.checkpoint import Checkpoints
from utils.distributed.group import Agreement
from utils.exchange import Exchange
from utils.launch.signals import AgreedSignal

RICH = {"optimizer": "adamw", "lr": 0.01, "ema_decay": 0.9}
DILOCO = {"name": "diloco", "outer": {"lr": 0.7, "momentum": 0.9}, "averages_state": True}
STEPS = 12


def train(
    exchange, folder: Path, options: dict, stop: int | None = None, resume: bool = False
) -> list[dict]:
    """Trains 3 workers to step `stop`, or to the end, with checkpoints in `folder`; returns the
    metrics."""
    if exchange.size > 1:
        exchange.local_rank = exchange.rank % (exchange.size // 2)  # as if on two nodes
    torch.manual_seed(5 if exchange.rank == 0 and not resume else 99)
    model = toy.network(dropout=0.2, seed=77 if resume else 1)
    torch.manual_seed(5)
    signals = toy.NoSignals()
    trainer = toy.make_trainer(
        folder / f"{exchange.rank}-of-{exchange.size}",
        model=model,
        exchange=exchange,
        signals=signals,
        epochs=3,
        batch_size=2,
        **options | {"local": {"workers": 3, "base": 5, "bn_batches": 4} | options["local"]},
    )
    trainer.saver.store = Checkpoints(folder / "checkpoints", keep=100)
    if resume:
        trainer.restore(trainer.saver.store.load())
    if stop is not None:
        update = trainer.steps.update

        def until():
            update()
            if trainer.progress.step == stop:
                trainer.save(final=True)
                raise KeyboardInterrupt

        trainer.steps.update = until
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit()
    return toy.history(folder / f"{exchange.rank}-of-{exchange.size}")


def saved(folder: Path):
    return Checkpoints(folder / "checkpoints", keep=100).load()


@pytest.mark.parametrize(
    "options",
    [
        RICH | {"local": DILOCO},
        pytest.param(RICH | {"local": {}}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "ngd", "local": {}}, marks=pytest.mark.slow),
    ],
)
def test_processes_do_not_change_a_bit(worlds, tmp_path, options):
    """Of 3 workers 2 processes have 1 and 2; also after a stop inside a round, with another number
    of processes."""
    figures = train(Exchange(), tmp_path / "one", options)
    first, _ = worlds(2).run(train, tmp_path / "two", options)
    assert first == figures and len(figures) > STEPS // 2
    one = saved(tmp_path / "one")
    assert_same_checkpoint(one, saved(tmp_path / "two"))
    assert one.step == STEPS and one.state["local"]["averagings"] == 3

    train(Exchange(), tmp_path / "grows", options, 7)
    worlds(2).run(train, tmp_path / "grows", options, None, True)
    assert_same_checkpoint(one, saved(tmp_path / "grows"))
    worlds(2).run(train, tmp_path / "shrinks", options, 7)
    names = {path.name for path in (tmp_path / "shrinks/checkpoints/step-00000007").iterdir()}
    assert {"model.safetensors", "workers.rank-00002-of-00002.safetensors"} <= names
    assert "model.rank-00001-of-00002.safetensors" not in names
    train(Exchange(), tmp_path / "shrinks", options, None, True)
    assert_same_checkpoint(one, saved(tmp_path / "shrinks"))


def train_where_one_skips(exchange, folder: Path) -> None:
    """Of 3 workers the last one leaves out its first two steps, and so has no optimizer state until
    the third averaging."""
    trainer = toy.make_trainer(
        folder / str(exchange.rank), model=toy.network(norm=False), exchange=exchange, max_steps=5,
        batch_size=2, optimizer="ngd", lr=0.01, on_nonfinite="skip", eval_every=0,
        local={"workers": 3, "base": 1, "averages_state": True},
    )  # fmt: skip
    trainer.saver.store = Checkpoints(folder / "checkpoints", keep=100)
    forward_backward = trainer.steps.forward_backward

    def with_nan(batch) -> None:
        bad = trainer.progress.step < 2 and trainer.steps.workers.own[batch.worker] == 2
        forward_backward(batch._replace(inputs=batch.inputs * (float("nan") if bad else 1)))

    trainer.steps.forward_backward = with_nan
    trainer.fit()


def test_processes_notice_the_new_state_of_one_of_them(worlds, tmp_path):
    train_where_one_skips(Exchange(), tmp_path / "one")
    worlds(2).run(train_where_one_skips, tmp_path / "two")
    one = saved(tmp_path / "one")
    assert 5 + 3 < one.state["local"]["sent"] < 5 + 4  # momentum in the last three averagings
    assert_same_checkpoint(one, saved(tmp_path / "two"))


@pytest.mark.slow
def test_four_processes_have_the_bits_of_one(worlds, tmp_path):
    """With 4 and with 5 workers, which are 2, 1, 1 and 1."""
    for workers in (4, 5):
        options = RICH | {"local": DILOCO | {"workers": workers}}
        folders = [tmp_path / f"{workers}-{size}" for size in (1, 4)]
        figures = train(Exchange(), folders[0], options)
        first, *_ = worlds(4).run(train, folders[1], options)
        # In an evaluation each process adds up its own samples first.
        trained = [[r for r in each if r["split"] == "train"] for each in (first, figures)]
        assert trained[0] == trained[1] and len(trained[0]) < len(figures)
        assert_same_checkpoint(*map(saved, folders))


def as_ddp(exchange, local: bool) -> dict:
    """Weights and statistics of a run that averages in every step, in float64."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"local": {"workers": exchange.size}} if local else {}
        trainer = toy.make_trainer(
            Path(folder), model=double_network(), exchange=exchange, epochs=3, eval_every=0,
            **options,
        )  # fmt: skip
        trainer.save = lambda final=False: None
        trainer.fit()
        found = parameters_of(trainer)
        with trainer.steps.evaluated_weights():
            buffers = dict(trainer.steps.model.named_buffers())
            return found | {name: buffer.clone() for name, buffer in buffers.items()}


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_averaging_in_every_step_is_ddp(worlds, size):
    """With BatchNorm, whose statistics are averaged; the last step of an epoch is a short one."""
    local, ddp = (worlds(size).run(as_ddp, local) for local in (True, False))
    for name, tensor in ddp[0].items():
        torch.testing.assert_close(local[0][name], tensor, rtol=0, atol=1e-14)


def counted(exchange, options: dict) -> tuple:
    """Collectives and messages of a step, and how many parameters there are."""
    exchange.sum_rows(torch.zeros(1, 1), [1] * exchange.size)  # the first call asks for the nodes
    runs = []
    for steps in (8, 16):
        with tempfile.TemporaryDirectory() as folder:
            trainer = toy.make_trainer(
                Path(folder, str(exchange.rank)), exchange=exchange, epochs=40, max_steps=steps,
                local={"workers": exchange.size, "base": 4} | options, log_every=10**6,
                data=toy.loader(2, n=640, rank=exchange.rank, ranks=exchange.size), eval_every=0,
                agreed_signal=AgreedSignal(toy.NoSignals(), Agreement(exchange)),
            )  # fmt: skip
            trainer.save = lambda final=False: None
            with Collectives() as collectives:
                trainer.fit()
            runs.append(collectives.calls)
    parameters = sum(p.numel() for p in trainer.steps.model.parameters())
    return per_step(*runs, 8), parameters


def halves(count: int) -> tuple:
    """The calls by which one of two processes sends half of so many numbers, and the other half."""
    return ("send", 4 * (count // 2)), ("send", 4 * (count - count // 2))


def test_nothing_is_sent_between_two_averagings(worlds):
    """But the agreement on stopping and saving, in every step."""
    for calls, count in worlds(2).run(counted, {}):
        assert calls == dict.fromkeys(halves(count), 1 / 4) | {("all_reduce", 8): 1}


def test_names_of_averaged_state_are_gathered_once(worlds):
    """Later averagings ask only whether they have changed, with 4 bytes."""
    for calls, count in worlds(2).run(counted, {"averages_state": True}):
        expected = {("all_reduce", 8): 1, ("all_reduce", 4): 1 / 4}
        assert calls == dict.fromkeys(halves(count), 2 / 4) | expected


def test_a_model_without_norms_needs_no_statistics(tmp_path):
    trainer = toy.make_trainer(
        tmp_path, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), max_steps=2,
        local={"workers": 2, "bn_batches": 3},
    )  # fmt: skip
    trainer.fit()
    assert trainer.progress.step == 2
