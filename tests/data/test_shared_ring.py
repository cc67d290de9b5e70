"""The shared memory of worker processes, where there is little of it."""

import errno
import os
from pathlib import Path

import pytest

from utils.data import shared_ring
from utils.data.shared_ring import PAGE, Ring

SHM = Path(shared_ring.FOLDER)
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="the system has no /dev/shm")


@pytest.mark.parametrize(
    "pages, ranks, slots",
    [
        (16, 1, [8]),
        (16, 2, [8, 8]),  # the last one may take all that is left
        (7, 2, [3, 2]),
        (8, 4, [2, 2, 2, 2]),
        (5, 1, [5]),
    ],
)
def test_ranks_leave_each_other_shared_memory(monkeypatch, pages, ranks, slots):
    rings, said = [], []

    def free():
        return (pages - sum(len(ring.array) for ring in rings)) * PAGE

    monkeypatch.setattr(shared_ring, "free_bytes", free)
    monkeypatch.setattr(shared_ring, "total_bytes", lambda: pages * PAGE)
    try:
        for _ in range(ranks):
            rings.append(Ring.create(8, PAGE, said.append, ranks))
        assert [len(ring.array) for ring in rings] == slots
        assert len(said) == sum(number < 8 for number in slots)
    finally:
        for ring in rings:
            ring.close()


def test_shared_memory_that_others_take_meanwhile(monkeypatch):
    """Fewer slots are tried then, as there may be room for these."""
    tried, said = [], []
    reserve = os.posix_fallocate

    def small(handle, offset, size):
        tried.append(size // PAGE)
        if tried[-1] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", small)
    before = set(os.listdir(SHM))
    ring = Ring.create(5, PAGE, said.append)
    try:
        assert tried == [5, 4, 3] and len(ring.array) == 3 and "3 batches" in said[0]
        assert set(os.listdir(SHM)) - before == {ring.name}
    finally:
        ring.close()


def test_shared_memory_is_reserved_at_the_start():
    ring = Ring.create(3, 1 << 20, print)
    try:
        assert os.stat(SHM / ring.name).st_blocks * 512 >= 3 << 20
        assert ring.array.shape == (3, 1 << 20)
    finally:
        ring.close()
    assert not (SHM / ring.name).exists()
