"""What the ranks tell each other, against plain sums and lists."""

import os
import time

import pytest
import torch

from utils.distributed.exchange import ProcessExchange, Rows
from utils.exchange import Exchange

SIZES = (1, 2, 4)


def told(exchange) -> dict:
    """Everything that a rank hears of the numbers 10 * rank + (0, 1, 2)."""
    own = 10.0 * exchange.rank + torch.arange(3.0)
    given = own.clone()
    sent = own.clone()
    exchange.broadcast_(sent, exchange.size - 1)
    heard = {
        "sum": exchange.sum(own).tolist(),
        "mean": exchange.mean(own).tolist(),
        "broadcast": sent.tolist(),
        "gather": [tensor.tolist() for tensor in exchange.gather(own)],
        "objects": exchange.gather_objects({"rank": exchange.rank}),
        "who": (exchange.rank, exchange.size),
    }
    assert torch.equal(own, given)
    exchange.barrier()
    return heard


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_the_same(worlds, size):
    own = [[10.0 * rank + i for i in range(3)] for rank in range(size)]
    sums = [sum(column) for column in zip(*own, strict=True)]
    for rank, heard in enumerate(worlds(size).run(told)):
        assert heard == {
            "sum": sums,
            "mean": [value / size for value in sums],
            "broadcast": own[-1],
            "gather": own,
            "objects": [{"rank": other} for other in range(size)],
            "who": (rank, size),
        }


def test_alone_it_is_the_identity(worlds):
    assert told(Exchange()) == worlds(1).run(told)[0]


def divided(exchange, length: int) -> bool:
    whole = torch.arange(length * 6.0).view(length, 2, 3)
    most = -(-length // exchange.size)
    start = min(exchange.rank * most, length)
    rows = Rows(whole.shape, start, min(start + most, length))
    parameter = whole[rows.start : rows.end].clone()
    exchange.divide(parameter, rows)
    assert exchange.shape(parameter) == whole.shape
    assert torch.equal(exchange.part(parameter, whole), parameter)
    assert torch.equal(exchange.whole(parameter, 2 * parameter), 2 * whole)
    other = torch.zeros(length)
    assert exchange.shape(other) == other.shape and exchange.whole(other, other) is other
    return True


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", (1, 3, 5, 8))  # fewer rows than ranks, and uneven ones
def test_divided_parameters_come_together(worlds, size, length):
    assert all(worlds(size).run(divided, length))


def in_turns(exchange, folder: str, machine: int) -> list[str]:
    """What lay there when it was this rank's turn; ranks of a machine are `machine` many."""
    exchange = ProcessExchange(local_rank=exchange.rank % machine)
    with exchange.in_turn():
        found = sorted(os.listdir(folder))
        time.sleep(0.05)
        open(f"{folder}/{exchange.rank}", "w").close()
    assert len(os.listdir(folder)) == exchange.size  # nobody goes on before the last one
    return found


@pytest.mark.parametrize("size, machine", ((1, 1), (2, 2), (2, 1), (4, 2), (4, 4)))
def test_one_rank_goes_first_then_one_of_each_machine(worlds, tmp_path, size, machine):
    found = worlds(size).run(in_turns, str(tmp_path), machine)
    assert found[0] == []
    heads = [rank for rank in range(1, size) if rank % machine == 0]
    for rank in heads:
        assert "0" in found[rank] and all(int(name) % machine == 0 for name in found[rank])
    for rank in range(1, size):
        if rank not in heads:
            assert {"0", *map(str, heads)} <= set(found[rank])
