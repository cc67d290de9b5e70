"""How often ranks communicate in a step, and how much, as docs/distributed.md says."""

import tempfile
from pathlib import Path

import pytest
import toy

from benchmarks.collectives import BUCKET, Collectives, per_step, sent
from utils.distributed.group import Agreement
from utils.launch.signals import AgreedSignal
from utils.models.resnet import ResNet

# Steps of the shorter run, after which all periods of NGD are alike, and of a period.
FEW, MORE = 12, 4


def counted(exchange, strategy: str, accumulation: int, optimizer: str = "sgd") -> dict:
    """Collectives of a step on this rank, and numbers to compare them with."""
    runs = []
    for steps in (FEW, FEW + MORE):
        with tempfile.TemporaryDirectory() as folder:
            model = ResNet(18, 3, width=8)
            trainer = toy.make_trainer(
                Path(folder, str(exchange.rank)),
                model=model,
                exchange=exchange,
                strategy=strategy,
                batch_size=2,
                accumulation=accumulation,
                optimizer=optimizer,
                epochs=40,
                max_steps=steps,
                log_every=10**6,
                eval_every=0,
                data=toy.loader(
                    2, accumulation, n=640, rank=exchange.rank, ranks=exchange.size, least=2
                ),
                agreed_signal=AgreedSignal(toy.NoSignals(), Agreement(exchange)),
            )
            with Collectives() as collectives:
                collectives.hook(trainer.steps.strategy)
                trainer.fit()
            runs.append(collectives.calls)
    flat = [buffers for buffers in trainer.steps.guard.flat if buffers.is_floating_point()]
    shares = getattr(trainer.steps.optimizer, "_shares", [])
    return {
        "calls": per_step(*runs, MORE),
        "whole gradient": 4 * sum(p.numel() for p in ResNet(18, 3, width=8).parameters()),
        "statistics": 8 * (1 + sum(map(len, flat))),
        "shares": [4 * each.longest for each in shares],
    }


@pytest.mark.parametrize("accumulation", (1, pytest.param(4, marks=pytest.mark.slow)))
def test_ddp_reduces_the_gradient_once_a_step(worlds, accumulation):
    for rank in worlds(2).run(counted, "ddp", accumulation):
        calls = dict(rank["calls"])
        buckets = {key: calls.pop(key) for key in list(calls) if key[0] == BUCKET}
        reduced = sum(number * length for (_, length), number in buckets.items())
        assert reduced == rank["whole gradient"]  # summed over the buckets
        # The loss and BatchNorm's statistics; whether to stop or save.
        assert calls == {("all_reduce", rank["statistics"]): 1, ("all_reduce", 8): 1}


@pytest.mark.slow
def test_ngd_sends_its_matrices_once_a_period(worlds):
    for rank in worlds(2).run(counted, "ddp", 1, "ngd"):
        gathered = {k: n for k, n in rank["calls"].items() if k[0] == "all_gather"}
        (share,) = rank["shares"]
        assert gathered == {("all_gather", share): 1 / 4}


@pytest.mark.slow
def test_fsdp_gathers_twice_and_reduces_once(worlds):
    for rank in worlds(2).run(counted, "fsdp", 1):
        total = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0.0)
        for (kind, length), number in rank["calls"].items():
            total[kind] += number * length
        whole = rank["whole gradient"]
        # Rows that two do not divide are padded; what is outside of the blocks stays whole from
        # the forward to the backward pass.
        assert whole <= total["reduce_scatter"] < 1.02 * whole
        assert 0.9 * whole < total["all_gather"] < 1.02 * whole
        assert total["all_reduce"] == rank["statistics"] + 8 + 4  # and the gradient's norm


def test_bytes_that_a_ring_sends():
    assert sent("all_reduce", 100, 2) == 100 and sent(BUCKET, 100, 4) == 150
    assert sent("all_gather", 100, 4) == 300 and sent("reduce_scatter", 100, 4) == 75
