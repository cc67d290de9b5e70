"""The parts of --check that need other ranks, in real processes."""

import time
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from utils.check import arithmetic, ranks
from utils.distributed import collectives
from utils.distributed.strategies.base import Strategy

CPU = torch.device("cpu")


def equal(exchange):
    return arithmetic.difference_from_one(exchange, CPU)


def unequal(exchange):
    """With ranks that do not exchange their gradients."""
    with patch.object(arithmetic, "build_strategy", lambda name, model, exchange: Strategy(model)):
        return arithmetic.difference_from_one(exchange, CPU)


def clocks(exchange, ahead):
    return ranks.clock_offsets(exchange, lambda: time.time() + ahead * exchange.rank)


def folder(exchange, paths):
    return ranks.folder_problem(exchange, paths[exchange.rank], f"node{exchange.rank}", 0.3)


def timings(exchange):
    with ExitStack() as stack:
        for name, value in (("TOTAL_SECONDS", 0.0), ("LARGEST", {"cpu": 1 << 21})):
            stack.enter_context(patch.object(collectives, name, value))
        found = [collectives.measure(exchange, CPU, name) for name in collectives.COLLECTIVES]
    return [(t.name, t.latency > 0, t.size, t.seconds, t.bandwidth) for t in found]


def test_a_network_trained_by_two_equals_that_of_one(worlds):
    for difference, others in worlds(2).run(equal):
        assert difference <= arithmetic.ALLOWED_IN_FLOAT64 and others == []
    for difference, others in worlds(2).run(unequal):
        assert difference > 1e-3 and others == [1]


def test_clocks_that_differ(worlds):
    for offsets in worlds(2).run(clocks, 5.0):
        assert offsets[0] == 0 and 4.0 < offsets[1] < 6.0


def test_a_folder_that_is_shared_and_one_that_is_not(worlds, tmp_path):
    ours = tmp_path / "ours"
    assert worlds(2).run(folder, [ours, ours]) == [None, None]
    assert not ours.exists()
    apart = [tmp_path / "one", tmp_path / "two"]
    for problem in worlds(2).run(folder, apart):
        assert problem == "node0 does not see what other hosts write there"
    (tmp_path / "file").touch()
    for problem in worlds(2).run(folder, [ours, tmp_path / "file" / "x"]):
        assert problem.startswith("node1 cannot write to it: ")


def test_every_collective_is_timed_alike_on_all_ranks(worlds):
    first, second = worlds(2).run(timings)
    assert first == second
    assert [name for name, *_ in first] == list(collectives.COLLECTIVES)
    for name, positive, size, seconds, bandwidth in first:
        assert positive and 1 << 20 <= size <= 1 << 21
        assert bandwidth == collectives.bus_bandwidth(name, size, seconds, 2)


@pytest.mark.parametrize(
    ("name", "sent"), [("all-reduce", 6), ("all-gather", 3), ("reduce-scatter", 3),
                       ("broadcast", 4)]
)  # fmt: skip
def test_bus_bandwidth_counts_what_a_ring_sends(name, sent):
    """Four ranks, a tensor of four parts: `sent` parts leave each rank in two seconds."""
    assert collectives.bus_bandwidth(name, 400, 2.0, 4) == sent * 100 / 2
