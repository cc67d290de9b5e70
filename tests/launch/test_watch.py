"""A rank that is missing or behind is named, by one other rank, and only then."""

import datetime
import time

import pytest
import torch.distributed as dist
from patience import PATIENCE, wait_until

from utils.launch import watch
from utils.launch.watch import Place, Watch, report


class Clock:
    """Replaces the module `time` in watch.py. It advances by `tick` alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.002)

    def tick(self, *ranks: "Rank") -> None:
        """Advances by 0.1 s when each of the ranks has written to the store or has ended."""
        # Of three readings of its step in a row a rank writes at least two.
        counts = [rank.readings + 3 for rank in ranks]
        wait_until(
            lambda: all(
                rank.readings >= count or rank.exit_code is not None
                for rank, count in zip(ranks, counts, strict=True)
            )
        )
        self.now += 0.1


class Rank:
    """A process that is watched, with its number of steps.

    Attributes:
        readings: how often the watch has asked for the step.
        exit_code: with which the watch has ended the process; None: it has not.
    """

    def __init__(self, rank: int, size: int, timeout: float, step: int, store: dist.Store):
        self.last_step, self.readings, self.exit_code = step, 0, None
        self.watch = Watch(rank, size, timeout, self.step, store, self.end)

    def step(self) -> int:
        self.readings += 1
        return self.last_step

    def end(self, code: int) -> None:
        self.exit_code = code


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.002)
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.4)
    monkeypatch.setattr(watch, "SILENT_SECONDS_AT_FIRST", 2.4)
    monkeypatch.setattr(watch, "time", clock)
    return clock


@pytest.fixture
def store():
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )  # fmt: skip


def seconds_until_all_end(clock: Clock, ranks: list[Rank]) -> float:
    start = clock.now
    while any(rank.exit_code is None for rank in ranks):
        assert clock.now - start < 60
        clock.tick(*ranks)
    return clock.now - start


def test_a_rank_that_does_not_answer_is_named(clock, store, capfd):
    ranks = [Rank(rank, 3, 1.0, 40 + rank, store) for rank in range(3)]
    clock.tick(*ranks)
    ranks[1].watch.close()  # writes nothing any more
    left = [ranks[0], ranks[2]]
    for rank in left:
        rank.watch.beat()
    assert seconds_until_all_end(clock, left) > 1.0
    assert [rank.exit_code for rank in ranks] == [1, None, 1]
    said = capfd.readouterr().err
    assert said.count("error:") == 1  # by one of the others
    assert (
        "no step for 1 s (--dist_timeout): no response from rank 1 (last step 41) of 3 processes"
        in said
    )


def test_a_rank_that_answers_but_makes_no_progress_is_named(clock, store, capfd):
    """By what it does: in a collective no rank finishes a step before the others."""
    ranks = [Rank(rank, 3, 1.0, 7, store) for rank in range(3)]
    for rank in ranks:
        rank.watch.enter("loading" if rank is ranks[1] else "computing")
        rank.watch.beat()
    seconds_until_all_end(clock, ranks)
    assert [rank.exit_code for rank in ranks] == [1, 1, 1]
    assert (
        "all 3 processes respond: rank 1 is loading after step 7; the others are computing after "
        "step 7; see docs" in capfd.readouterr().err
    )


def test_a_rank_that_hangs_in_the_first_step_is_named(clock, store, capfd):
    """Once all have done what they do for the whole timeout."""
    ranks = [Rank(rank, 3, 1.0, 0, store) for rank in range(3)]
    for rank in ranks:
        rank.watch.enter("loading")
    for _ in range(8):
        clock.tick(*ranks)
    for rank in ranks[:2]:
        rank.watch.enter("computing")
    assert seconds_until_all_end(clock, ranks) > 1.0
    assert (
        "rank 2 is loading before the first step; the others are computing before the first step; "
        "see docs" in capfd.readouterr().err
    )


def test_a_rank_that_is_silent_in_the_first_step_is_named(clock, store, capfd):
    ranks = [Rank(rank, 2, 1.0, 0, store) for rank in range(2)]
    for rank in ranks:
        rank.watch.enter("computing")
    clock.tick(*ranks)
    ranks[1].watch.close()
    seconds_until_all_end(clock, ranks[:1])
    assert "no response from rank 1 (before its first step) of 2" in capfd.readouterr().err


def test_a_first_step_may_take_longer_than_the_timeout(clock, store, capfd):
    """A compiler runs in it: all compute, or one has begun with its next micro-batch."""
    ranks = [Rank(rank, 2, 0.5, 6, store) for rank in range(2)]
    for rank in ranks:
        rank.watch.enter("computing")
    for count in range(60):
        if count % 3 == 0:
            ranks[1].watch.enter("loading")
        clock.tick(*ranks)
    assert [rank.exit_code for rank in ranks] == [None, None] and capfd.readouterr().err == ""
    for rank in ranks:  # the step after it may not
        rank.last_step = 7
        rank.watch.beat()
    seconds_until_all_end(clock, ranks)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([(6, "computing"), (5, "loading")],
         "rank 1 is loading after step 5; rank 0 is computing after step 6; see"),
        ([(6, "loading"), (6, "saving"), (6, "loading"), *[(6, "computing")] * 3],
         "rank 1 is saving after step 6; ranks 0, 2 are loading after step 6; the others are "
         "computing after step 6; see"),
        ([(6, "computing")] * 2, "all are computing after step 6, and none is behind; see"),
        ([(0, "evaluating")] * 2, "all are evaluating before the first step, and none is behind; "),
    ],
)  # fmt: skip
def test_the_line_about_ranks_that_all_respond(places, text):
    known = {rank: Place(9, *place, 20.0) for rank, place in enumerate(places)}
    assert f"respond: {text}" in report(20, len(places), [], known)


def test_nothing_happens_before_the_first_step_or_during_progress(clock, store, capfd):
    idle, busy = (Rank(rank, 2, 0.5, 0, store) for rank in range(2))
    for _ in range(5):
        busy.watch.beat()
        for _ in range(4):
            clock.tick(idle, busy)
    idle.watch.close(), busy.watch.close()
    assert idle.exit_code is busy.exit_code is None and capfd.readouterr().err == ""


def test_the_line_about_a_rank_that_has_never_written():
    assert "no response from rank 1 (before its first step) of 2 processes" in report(
        20, 2, [1], {0: Place(9, 3, "computing", 20.0)}
    )
