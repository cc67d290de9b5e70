"""Worker processes that hang are replaced."""

from types import SimpleNamespace

import numpy as np
import pytest
from worker_helpers import Hang, Plan, mapped, worker_processes

from utils.data import workers as module
from utils.data.workers import HANGS, WorkerPool
from utils.errors import UserError

N, BATCH, ROW = 61, 8, 20


@pytest.fixture
def images(tmp_path):
    return mapped(tmp_path / "images.npy", N)


@pytest.fixture
def pool_and_reader(images, tmp_path, monkeypatch):
    """start(times) -> a pool of one worker, and a reader that hangs so many times. Time passes only
    while a worker hangs, so that none is replaced because the machine is slow."""
    file, now, pools = tmp_path / "hanging.txt", [0.0], []
    file.touch()

    def clock() -> float:
        alive = {str(process.pid) for process in worker_processes()}
        now[0] += bool(alive & set(file.read_text().split()))
        return now[0]

    # For this module alone: `worker_processes` asks the true clock.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))

    def start(times: int):
        said = []
        pools.append(WorkerPool(1, images[:BATCH].nbytes, said.append, patience=0.3))
        pools[-1].said = said
        return pools[-1], pools[-1].reader(images, Hang(ROW, str(file), times))

    yield start
    for pool in pools:
        pool.close()
    assert worker_processes() == []


def pieces():
    """Of plans that fill the pipe to a worker."""
    for start in range(0, N, BATCH):
        plan = Plan()
        plan.choices = np.zeros(1 << 20, np.uint8)
        yield np.arange(start, min(start + BATCH, N)), plan


def test_a_worker_that_hangs_is_replaced_and_no_batch_is_lost(images, pool_and_reader):
    pool, reader = pool_and_reader(times=1)
    batches = list(pool.batches(reader, pieces(), np.array))
    assert np.array_equal(np.concatenate(batches), images)
    (line,) = pool.said
    assert "no answer for 0.3 seconds" in line and "no batch is lost" in line
    assert np.array_equal(np.concatenate(list(pool.batches(reader, pieces(), np.array))), images)


@pytest.mark.slow
def test_workers_that_hang_again_and_again_end_the_run_in_one_line(images, pool_and_reader):
    pool, reader = pool_and_reader(times=9)
    batches = pool.batches(reader, pieces(), np.array)
    assert np.array_equal([next(batches), next(batches)], [images[:8], images[8:16]])
    with pytest.raises(UserError, match=r"no answer.*same batch.*--resume") as error:
        next(batches)
    assert "\n" not in str(error.value) and len(pool.said) == HANGS - 1
    assert worker_processes() == []
