"""Exchanges between ranks, against plain sums and lists."""

import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from utils.checkpoints.states import random_states, restore_random_states
from utils.distributed.exchange import ProcessExchange
from utils.distributed.group import agree_on_data, is_lost_peer, meet
from utils.errors import UserError
from utils.exchange import Exchange, Rows, add_in_order
from utils.launch.launchers import TORCHRUN, LaunchedAs

SIZES = (1, 2, 4)


def told(exchange) -> dict:
    """The result of every exchange where rank r has the numbers 10 r + (0, 1, 2)."""
    own = 10.0 * exchange.rank + torch.arange(3.0)
    given = own.clone()
    heard = {
        "sum": exchange.sum(own).tolist(),
        "mean": exchange.mean(own).tolist(),
        "gather": [tensor.tolist() for tensor in exchange.gather(own)],
        "json": exchange.gather_json({"rank": exchange.rank}),
        "who": (exchange.rank, exchange.size),
    }
    assert torch.equal(own, given)
    exchange.barrier()
    return heard


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_right_result(worlds, size):
    own = [[10.0 * rank + i for i in range(3)] for rank in range(size)]
    sums = [sum(column) for column in zip(*own, strict=True)]
    for rank, heard in enumerate(worlds(size).run(told)):
        assert heard == {
            "sum": sums,
            "mean": [value / size for value in sums],
            "gather": own,
            "json": [{"rank": other} for other in range(size)],
            "who": (rank, size),
        }


def test_a_process_alone_gets_what_a_group_of_one_gets(worlds):
    assert told(Exchange()) == worlds(1).run(told)[0]


VALUES = (
    None, True, 0, -(10**30), 0.1, math.inf, -math.inf, "", "Zoë \udcff \n", [], {},
    [[1, "a"], {"b": [None, 2.5]}], "x" * 100_000,
)  # fmt: skip


def told_in_json(exchange, values: tuple) -> list:
    """What is gathered for each value, where rank r gives the one r places further on."""
    number = len(values)
    return [exchange.gather_json(values[(i + exchange.rank) % number]) for i in range(number)]


@pytest.mark.parametrize("size", SIZES)
def test_values_come_through_json_unchanged(worlds, size):
    """Even if they have another length on every rank."""
    number = len(VALUES)
    expected = [[VALUES[(i + rank) % number] for rank in range(size)] for i in range(number)]
    assert worlds(size).run(told_in_json, VALUES) == [expected] * size


def of_json_alone(exchange) -> list:
    """NaN, keys and tuples, which JSON changes or extends, and the random states of checkpoints."""
    torch.manual_seed(exchange.rank)
    torch.rand(3)
    states = exchange.gather_json(random_states())
    restore_random_states(states, (exchange.rank + 1) % exchange.size)
    return [math.isnan(exchange.gather_json(math.nan)[0]), exchange.gather_json({3: (1, 2)}),
            torch.rand(1).item()]  # fmt: skip


def test_what_json_makes_of_python(worlds):
    drawn = []
    for seed in (1, 0):
        torch.manual_seed(seed)
        drawn.append(torch.rand(4)[3].item())
    for number, heard in zip(drawn, worlds(2).run(of_json_alone), strict=True):
        assert heard == [True, [{"3": [1, 2]}] * 2, number]


def given_no_json(exchange) -> list:
    """One rank is refused by itself: none waits for it, and the next exchange is right."""
    for value in (torch.zeros(2), b"bytes", {1}, [torch.float32], {"deep": [{"er": object()}]}):
        if exchange.rank == 0:
            with pytest.raises(TypeError, match="JSON"):
                exchange.gather_json(value)
    return exchange.gather_json(exchange.rank)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_json_is_refused_before_the_ranks_meet(worlds, size):
    assert worlds(size).run(given_no_json) == [[*range(size)]] * size


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
def test_divided_parameters_are_put_together(worlds, size, length):
    assert all(worlds(size).run(divided, length))


def summed(
    exchange, rows: torch.Tensor, counts: list[int], nodes: list[int], as_nccl: bool
) -> torch.Tensor:
    """`nodes`: each rank's number among those of its node."""
    exchange = ProcessExchange(local_rank=nodes[exchange.rank])
    if as_nccl:
        exchange._by_gloo = exchange._by_nccl
    start = sum(counts[: exchange.rank])
    return exchange.sum_rows(rows[start : start + counts[exchange.rank]], counts)


@pytest.mark.parametrize("as_nccl", (False, True))
@pytest.mark.parametrize("nodes", ([0], [0, 1], [0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 2, 0]))
def test_rows_are_added_in_order(worlds, nodes, as_nccl):
    """To the bit, within nodes and from node to node, in several chunks."""
    size = len(nodes)
    scales = 10.0 ** (torch.arange(size + 1) % 3 * 3)
    rows = torch.randn(size + 1, 100_001, generator=torch.Generator().manual_seed(0))
    rows *= scales[:, None]
    expected = add_in_order(rows)
    assert size == 1 or not torch.equal(expected, add_in_order(rows.flip(0)))
    for total in worlds(size).run(summed, rows, [2] + [1] * (size - 1), nodes, as_nccl):
        assert torch.equal(total, expected)


def killed_in_a_sum(exchange, folder: str) -> None:
    """Each rank notes by which error it has ended; the third one is killed between two chunks."""
    exchange = ProcessExchange(local_rank=0)  # a chain of all
    wait, calls = exchange._wait, []

    def wait_or_die(works) -> None:
        calls.append(works)
        if exchange.rank == 2 and len(calls) == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(works)

    exchange._wait = wait_or_die
    try:
        exchange.sum_rows(torch.zeros(1, 1_000_000), [1] * exchange.size)
    except RuntimeError as error:
        Path(folder, str(exchange.rank)).write_text(f"lost a peer: {is_lost_peer(error)}")
    os._exit(1)


@pytest.mark.slow
def test_all_notice_that_one_has_died_in_a_sum(worlds, tmp_path):
    """Also those that do not exchange anything with it."""
    with pytest.raises(AssertionError, match="rank 2: it died"):
        worlds(4).run(killed_in_a_sum, str(tmp_path))
    ends = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert ends == dict.fromkeys("013", "lost a peer: True")


def in_turns(exchange, folder: str, machine: int) -> list[str]:
    """The files that were there when it was this rank's turn; a machine has `machine` ranks."""
    exchange = ProcessExchange(local_rank=exchange.rank % machine)
    with exchange.in_turn():
        found = sorted(os.listdir(folder))
        time.sleep(0.05)
        open(f"{folder}/{exchange.rank}", "w").close()
    assert len(os.listdir(folder)) == exchange.size  # all have waited for the last one
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


def failing_in_turn(exchange, failing: int) -> str:
    exchange = ProcessExchange(local_rank=exchange.rank)
    try:
        with exchange.in_turn():
            if exchange.rank == failing:
                raise UserError("its data is missing")
    except UserError as error:
        exchange.barrier()  # the store is that of rank 0
        return str(error)
    return ""


@pytest.mark.parametrize("failing", (0, 1))
def test_nobody_waits_for_a_rank_that_has_failed(worlds, failing):
    said = worlds(2).run(failing_in_turn, failing)
    assert said[failing] == "its data is missing"
    assert said[1 - failing] == f"process {failing} has failed, and its last lines say why"


# ---- what they tell each other once they have joined --------------------------------------------


def meet_with(exchange, seeds, folder, by="srun", **settings):
    numbers = (exchange.rank, exchange.size) if by == TORCHRUN else (None, None)
    place = LaunchedAs(exchange.rank, exchange.size, *numbers, by=by)
    settings |= {"seed": seeds[exchange.rank], "data_dir": f"{folder}/{exchange.rank}"}
    try:
        met = meet(ProcessExchange(), place, torch.device("cpu"), settings)
    except UserError as error:
        return str(error)
    return met.local_rank, met.local_world_size


def test_processes_find_their_numbers_on_the_machine(worlds):
    assert worlds(2).run(meet_with, [0, 0], "data") == [(0, 2), (1, 2)]


def meet_with_outputs(exchange, host_config):
    return meet_with(exchange, [0, 0], "data", output=exchange.rank, host_config=host_config)


def meet_again(exchange, folders):
    """As in a restart by the launcher, of a folder whose path depends on the machine."""
    resume = folders[exchange.rank]
    return meet_with(exchange, [0, 0], "data", TORCHRUN, resume=resume, output=resume)


def meet_another_version(exchange):
    own = {"new_flag": 1} if exchange.rank else {"old_flag": 1}
    return meet_with(exchange, [0, 0], "data", **own)


def test_the_folder_may_have_another_path_on_another_host(worlds):
    """As --host_config says; otherwise it shows that the processes are not one run."""
    assert worlds(2).run(meet_with_outputs, "hosts.yaml") == [(0, 2), (1, 2)]
    assert worlds(2).run(meet_again, ["/a/run", "/b/run"]) == [(0, 2), (1, 2)]
    for line in worlds(2).run(meet_again, ["/a/run", None]):
        assert line.startswith("--resume: rank 0 has a run, rank 1 has none")
    assert worlds(2).run(meet_another_version) == [(0, 2), (1, 2)]
    for line in worlds(2).run(meet_with_outputs, None):
        assert line.startswith("--output: rank 0 has 0, rank 1 has 1")


@pytest.mark.parametrize("by", ("srun", TORCHRUN))
def test_processes_with_other_settings_are_not_one_run(worlds, by):
    assert worlds(2).run(meet_with, [3, 3], "data", by) == [(0, 2), (1, 2)]
    for line in worlds(2).run(meet_with, [0, 7], "data", by):
        assert line.startswith("--seed: rank 0 has 0, rank 1 has 7, and") and "distributed" in line


def agree_on(exchange, fingerprints) -> str:
    try:
        agree_on_data(ProcessExchange(), fingerprints[exchange.rank], "--data_dir")
    except UserError as error:
        return str(error)
    return ""


def test_all_ranks_need_the_same_data(worlds):
    assert worlds(2).run(agree_on, ["cats", "cats"]) == ["", ""]
    for line in worlds(2).run(agree_on, ["cats", "dogs"]):
        assert line.startswith("--data_dir: the data of rank 1 (on ")
