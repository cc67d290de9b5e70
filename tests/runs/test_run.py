"""What a Run decides when it is resumed, on settings alone."""

from types import SimpleNamespace

import pytest

from utils.data.micro_batches import largest_divisor
from utils.local.workers import Workers
from utils.runs.run import Run


def shrunk(processes: int, **settings) -> tuple[dict, list[str]]:
    """What a run of this many processes changes, and says."""
    known = {"mixing_name": "mixup", "global_batch": 256, "batch_size": 32, "mixup_block": None}
    changes, said = {}, []
    run = SimpleNamespace(
        settings=SimpleNamespace(**known | settings),
        workers=Workers.divide(processes, 0, processes),
        change_settings=changes.update,
        console=SimpleNamespace(say=said.append),
    )
    Run._shrink_mixup_block(run)
    return changes, said


def test_more_processes_mix_within_smaller_blocks():
    assert shrunk(8) == ({}, [])
    assert shrunk(16)[0] == shrunk(12)[0] == {"mixup_block": 16}
    assert "16 (--mixup_block), not 32: 16 processes share a step of 256" in shrunk(16)[1][0]
    assert shrunk(16, mixup_block=8) == shrunk(16, mixing_name="none") == ({}, [])
    # A step of every process's own batches has a block for each; with single samples nothing
    # would be mixed, and the loader refuses so many processes.
    assert shrunk(16, global_batch=None) == shrunk(256) == ({}, [])


@pytest.mark.parametrize("n, most, largest", [(32, 21, 16), (30, 29, 15), (7, 6, 1), (8, 0, 1)])
def test_the_largest_divisor(n, most, largest):
    assert largest_divisor(n, most) == largest
