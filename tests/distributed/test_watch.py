"""Who is missing is named, by one rank, and only then."""

import datetime
import time

import pytest
import torch.distributed as dist

from utils.distributed import watch
from utils.distributed.watch import Watch, report


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.4)
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=5),
    )  # fmt: skip


def ended(codes: list, count: int) -> bool:
    until = time.monotonic() + 20
    while len(codes) < count and time.monotonic() < until:
        time.sleep(0.05)
    return len(codes) == count


def test_a_rank_that_does_not_answer_is_named(store, capfd):
    codes = []
    ranks = [
        Watch(rank, 3, 1.0, lambda rank=rank: 40 + rank, store, codes.append) for rank in range(3)
    ]
    time.sleep(0.3)
    ranks[1].close()  # stopped: its thread tells nothing any more
    for rank in (0, 2):
        ranks[rank].beat()
    assert ended(codes, 2) and codes == [1, 1]
    said = capfd.readouterr().err
    assert said.count("error:") == 1  # by one of those that are left
    assert "no step for 1 s (--dist_timeout): rank 1 (last step 41) of 3 does not answer" in said


def test_a_rank_that_lives_and_does_not_go_on_is_named(store, capfd):
    codes = []
    ranks = [
        Watch(rank, 2, 1.0, lambda rank=rank: 7 - rank, store, codes.append) for rank in range(2)
    ]
    for rank in ranks:
        rank.beat()
    assert ended(codes, 2)
    assert "all 2 ranks answer, and rank 1 (last step 6) does not go on" in capfd.readouterr().err


def test_nothing_happens_before_the_first_step_nor_while_it_goes_on(store, capfd):
    codes = []
    idle, busy = (Watch(rank, 2, 0.5, lambda: 0, store, codes.append) for rank in range(2))
    for _ in range(30):
        busy.beat()
        time.sleep(0.05)
    idle.close(), busy.close()
    assert codes == [] and capfd.readouterr().err == ""


def test_the_line_without_any_news_of_a_rank():
    assert "rank 1 (before its first step) of 2 does not answer" in report(20, 2, [1], {0: 3})
