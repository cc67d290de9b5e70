"""Which process trains which worker."""

import pytest

from utils.errors import UserError
from utils.local.workers import Workers


@pytest.mark.parametrize("size, ranks", [(1, 1), (4, 1), (4, 4), (5, 3), (7, 2)])
def test_every_worker_has_one_process(size, ranks):
    parts = [Workers.divide(size, rank, ranks) for rank in range(ranks)]
    assert [number for part in parts for number in part.own] == list(range(size))
    counts = tuple(len(part.own) for part in parts)
    assert all(part.counts == counts and part.size == size for part in parts)
    assert max(counts) - min(counts) <= 1


def test_more_processes_than_workers_are_refused():
    with pytest.raises(UserError, match="--local_workers 2 is less than the 3 processes"):
        Workers.divide(2, 0, 3)
