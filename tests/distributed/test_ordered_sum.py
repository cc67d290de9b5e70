"""The sum in the order of rows, with a thread in place of each process. Over real ones:
test_exchange.py."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from queue import Queue

import pytest
import torch
from patience import PATIENCE

from utils.distributed import ordered_sum
from utils.distributed.ordered_sum import chunk_count, node_size, parts, sum_rows, turns
from utils.exchange import add_in_order


def summed(rows: torch.Tensor, counts: list[int], size: int) -> tuple[list[torch.Tensor], Counter]:
    """(the sum as each process has it, numbers sent by (sender, receiver))."""
    ranks, of_processes, sent = range(len(counts)), rows.split(counts), Counter()
    wires = {pair: Queue() for pair in product(ranks, ranks)}

    def process(rank: int) -> torch.Tensor:
        def carry_out(steps) -> None:
            for step in steps:
                for tensor, other in step.sent:
                    sent[rank, other] += tensor.numel()
                    wires[rank, other].put(tensor.clone())
                for tensor, other in step.received:
                    tensor.copy_(wires[other, rank].get(timeout=PATIENCE))
                if step.then is not None:
                    step.then()

        own = of_processes[rank].clone()
        total = sum_rows(own, counts, rank, size, carry_out)
        assert torch.equal(own, of_processes[rank])
        return total

    with ThreadPoolExecutor(len(counts)) as threads:
        totals = list(threads.map(process, ranks))
    assert all(wire.empty() for wire in wires.values())
    return totals, sent


@pytest.mark.parametrize("n", (2, 61))  # fewer numbers than processes, and more
@pytest.mark.parametrize(
    ("nodes", "size"), ((1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (2, 4), (5, 1), (4, 3))
)
def test_the_sum_is_that_of_one_process(monkeypatch, nodes, size, n):
    """To the bit. What goes over a link between nodes does not grow with their processes."""
    monkeypatch.setattr(ordered_sum, "LEAST_CHUNK", 4)
    counts = [1 + rank % 3 for rank in range(nodes * size)]
    rows = torch.randn(sum(counts), n, generator=torch.Generator().manual_seed(n))
    rows *= 10.0 ** (torch.arange(len(rows)) % 3 * 3)[:, None]
    totals, sent = summed(rows, counts, size)
    for total in totals:
        assert torch.equal(total, add_in_order(rows))
    between = Counter()
    for (sender, receiver), count in sent.items():
        between[sender // size, receiver // size] += count
    for node in range(nodes):
        ahead = between.pop((node, node + 1), 0), between.pop((node + 1, node), 0)
        assert ahead == ((n, n) if node + 1 < nodes else (0, 0))
        within = between.pop((node, node), 0)
        of_node = sum(counts[node * size : (node + 1) * size])
        assert within <= (of_node + size) * n  # their rows, and the sum to each
    assert not between


def test_all_together_send_what_the_rings_of_ddp_send():
    """With a row on each process."""
    for nodes, size in ((1, 4), (4, 1), (3, 2)):
        ranks = nodes * size
        _, sent = summed(torch.randn(ranks, 60), [1] * ranks, size)
        assert sum(sent.values()) == ranks * 2 * (ranks - 1) / ranks * 60


@pytest.mark.parametrize("nodes", (2, 3, 6))
@pytest.mark.parametrize("chunks", (1, 2, 16))
def test_neighbours_agree_in_every_turn(nodes, chunks):
    plans = [list(turns(node, nodes, chunks)) for node in range(nodes)]
    assert {len(plan) for plan in plans} == {chunks + 2 * nodes - 3}
    for one, following in pairwise(plans):
        assert [turn.send_ahead for turn in one] == [turn.from_back for turn in following]
        assert [turn.from_ahead for turn in one] == [turn.send_back for turn in following]
    for plan in plans:  # nothing waits for what the same turn brings
        for turn in plan:
            numbers = [number for number in turn if number is not None]
            assert len(set(numbers)) == len(numbers)
    assert all(turn.from_back is None and turn.send_back is None for turn in plans[0])
    assert [turn.send_ahead for turn in plans[0][:chunks]] == [*range(chunks)]


def test_chunks_are_neither_many_nor_tiny():
    assert [chunk_count(length) for length in (1, 1 << 17, 1 << 30)] == [1, 2, 16]
    assert parts(5, 2) == [slice(0, 2), slice(2, 5)] and parts(1, 2) == [slice(0, 0), slice(0, 1)]


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    (
        ([0], 1), ([0, 1, 2, 3], 4), ([0, 1, 0, 1], 2), ([0, 0, 0], 1),
        ([0, 1, 2, 0, 1], 1),  # nodes of unequal size
        ([0, 0, 1, 1], 1),  # ranks that take turns between nodes
    ),
)  # fmt: skip
def test_processes_of_a_node(local_ranks, expected):
    assert node_size(local_ranks) == expected
