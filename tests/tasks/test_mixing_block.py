"""Blocks of mixing where many processes share an optimizer step."""

from types import SimpleNamespace

import pytest

from utils.data.steps import largest_divisor
from utils.tasks.mixing import mixing_block


def block(workers: int, **settings) -> int:
    known = {"global_batch": 256, "batch_size": 32, "mixup_block": None}
    return mixing_block(SimpleNamespace(**known | settings), workers)


def test_more_processes_mix_within_smaller_blocks():
    assert block(8) == 32 and block(16) == block(12) == 16
    assert block(16, mixup_block=8) == 8
    # A step that is smaller than a block is one block.
    assert block(1, global_batch=24) == 32
    # Where each process has batches of its own, it has a block. With single samples nothing would
    # be mixed, and the loader refuses so many processes.
    assert block(16, global_batch=None) == block(256) == 32


@pytest.mark.parametrize("n, most, largest", [(32, 21, 16), (30, 29, 15), (7, 6, 1), (8, 0, 1)])
def test_the_largest_divisor(n, most, largest):
    assert largest_divisor(n, most) == largest
