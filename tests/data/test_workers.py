"""Worker processes: batches are the same to the bit, whatever happens to them."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE, wait_until
from worker_helpers import PROGRAM, Fault, Plan, mapped, worker_processes

from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.random_erasing import RandomErasing
from utils.data import shared_ring
from utils.data.images.loader import ImageLoader
from utils.data.worker_process import is_map
from utils.data.workers import WorkerPool
from utils.errors import UserError
from utils.training.local.in_turn import in_turn, loaders_of

ROOT = Path(__file__).resolve().parents[2]
SHM = Path(shared_ring.FOLDER)
N, PICTURE = 61, 6 * 8 * 3
needs_shm = pytest.mark.skipif(not SHM.is_dir(), reason="the system has no /dev/shm")


@pytest.fixture
def images(tmp_path):
    return mapped(tmp_path / "images.npy", N)


@pytest.fixture
def make_pool():
    pools = []

    def make(workers=2, pictures=16):
        said = []
        pools.append(WorkerPool(workers, pictures * PICTURE, said.append))
        pools[-1].said = said
        return pools[-1]

    yield make
    memory = shared_memory_of(os.getpid())
    for pool in pools:
        pool.close()
        pool.close()  # once more does nothing
    assert not worker_processes() and not any(file.exists() for file in memory)


def augmentation():
    crop = CropFlip(6, 8, padding=2, cutout=2)
    return Chain(crop, RandomErasing(6, 8, 0.5, (10, 20, 30)))


def make_loader(images, pool, batch_size=8, accumulation=1, *, rows=None, **settings):
    """Labels are positions, so that the targets of a batch tell its samples."""
    n = len(images) if rows is None else len(rows)
    settings = {"shuffle": True, "seed": 3, "augment": augmentation()} | settings
    return ImageLoader(
        images, np.arange(n), mean=(0.4,) * 3, std=(0.2,) * 3, batch_size=batch_size, rows=rows,
        device=torch.device("cpu"), accumulation=accumulation, pool=pool, **settings,
    )  # fmt: skip


def assert_same(batches, expected):
    for one, other in zip(batches, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        assert one[2:] == other[2:]


def test_loaders_in_turn_drop_nothing(images, make_pool, monkeypatch):
    """As those of several local workers in a process."""
    pool, sent = make_pool(2), []
    send = pool._send
    monkeypatch.setattr(pool, "_send", lambda worker, job: sent.append(job) or send(worker, job))
    train = loaders_of(make_loader(images, pool, accumulation=2, ranks=2), [0, 1])
    plain = loaders_of(make_loader(images, None, accumulation=2, ranks=2), [0, 1])
    for epoch in range(2):
        assert_same(in_turn(train, epoch), in_turn(plain, epoch))
    val, plain_val = make_loader(images, pool), make_loader(images, None)
    assert_same(val.epoch(), plain_val.epoch())
    assert len(sent) == 2 * len(list(in_turn(plain, 0))) + len(list(plain_val.epoch()))


def read_ahead(pool, images) -> int:
    """How many batches the pool has in preparation at most, in an epoch of batches of 4."""
    drawn = most = 0

    def pieces():
        nonlocal drawn
        for rows in np.array_split(np.arange(N), N // 4):
            drawn += 1
            yield rows, None

    batches = pool.batches(pool.reader(images, None), pieces(), np.array)
    for given, _ in enumerate(batches, 1):
        most = max(most, drawn - given)
    return most - 1  # the last one drawn waits for a free slot


def shared_memory_of(pid: int) -> set[Path]:
    """The files of multiprocessing's shared memory that a process has open."""
    if not SHM.is_dir():
        return set()
    maps = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    names = {words[5] for words in maps if len(words) == 6}  # more words: the file was deleted
    return {Path(name) for name in names if name.startswith(f"{SHM}/psm_")}


def is_gone(pid: int) -> bool:
    """No such process, or a dead one that its parent has not waited for."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_are_those_without_workers(images, make_pool, workers):
    """All of these take turns with one pool: accumulation, resuming, a lone last sample, rows."""
    pool = make_pool(workers)
    rows = np.random.default_rng(0).permutation(N)[:33]
    cases = [
        {},
        {"batch_size": 15, "accumulation": 2},  # 61 = 2 * 30 + 1: one sample is left out
        {"batch_size": 4, "accumulation": 4, "rows": rows},  # 33 = 2 * 16 + 1
        {"batch_size": 15, "shuffle": False, "augment": None, "rows": rows[:31]},  # 15, 16
        {"batch_size": 1, "rows": rows[:3]},
        {"augment": CropFlip(6, 8, padding=3, mode="reflect"), "seed": 4},
    ]
    for case in cases:
        loader, plain = make_loader(images, pool, **case), make_loader(images, None, **case)
        for epoch, start_step in ((0, 0), (1, 0), (1, 2)):
            assert_same(loader.epoch(epoch, start_step), plain.epoch(epoch, start_step))
    assert pool.said == [] and read_ahead(pool, images) == 2 * workers


def test_rows_are_the_samples_with_and_without_workers(images, make_pool):
    rows = np.random.default_rng(1).permutation(N)[:20]
    copied = make_loader(np.array(images[rows]), None)
    for pool in (None, make_pool(1)):
        loader = make_loader(images, pool, rows=rows)
        assert loader.samples == 20 and loader.steps_per_epoch == 3
        assert np.array_equal(loader.order(2), copied.order(2))
        assert_same(loader.epoch(2), copied.epoch(2))


def test_iterators_may_be_left_and_may_take_turns(images, make_pool):
    pool = make_pool()
    train, val = make_loader(images, pool), make_loader(images, pool, shuffle=False, augment=None)
    plain = make_loader(images, None)
    plain_val = make_loader(images, None, shuffle=False, augment=None)
    kept = []  # left in the middle and not closed
    for epoch in range(4):
        kept.append(train.epoch(epoch))
        next(kept[-1])
        train.epoch(epoch)  # never begun
        next(train.epoch(epoch))  # left and closed
        assert_same(val.epoch(), plain_val.epoch())
    for epoch, batches in enumerate(kept):  # each goes on where it stopped
        expected = plain.epoch(epoch)
        next(expected)
        assert_same(batches, expected)
    one, other = train.epoch(7), val.epoch()
    both = zip(one, other, strict=True)  # a batch of each in turn
    for pair in zip(both, plain.epoch(7), plain_val.epoch(), strict=True):
        (ours, ours_val), theirs, theirs_val = pair
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours_val.inputs, theirs_val.inputs)
    assert_same(train.epoch(8), plain.epoch(8))
    wait_until(lambda: read_ahead(pool, images) == 4)  # what was dropped may still be on its way
    assert pool.said == []


def test_workers_start_with_the_first_batch_and_end_with_the_pool(images, make_pool):
    pool = make_pool()
    loader = make_loader(images, pool)
    batches = loader.epoch()
    assert worker_processes() == [] and not shared_memory_of(os.getpid())
    next(batches)
    assert len(worker_processes()) == 2
    pool.close()
    assert worker_processes() == []
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_workers_do_not_import_pytorch():
    code = "import sys, utils.data.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 2])
def test_killed_workers_are_replaced_and_no_batch_is_lost(images, make_pool, victims):
    pool = make_pool()
    loader, plain = make_loader(images, pool, 4), make_loader(images, None, 4)
    batches = []
    for step, batch in enumerate(loader.epoch()):
        batches.append(batch)
        if step in (0, 3, 9):
            for worker in worker_processes()[:victims]:
                worker.kill()
    assert_same(batches, plain.epoch())
    assert_same(loader.epoch(1), plain.epoch(1))
    # A death is noticed only while there is work.
    assert 2 <= len(pool.said) <= 3 * victims and all("SIGKILL" in line for line in pool.said)
    assert read_ahead(pool, images) == 4


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_in_one_line(images, make_pool):
    pool = make_pool()
    reader = pool.reader(images, Fault(20, deadly=True))
    pieces = [(np.arange(start, start + 8), Plan()) for start in range(0, 40, 8)]
    batches = pool.batches(reader, iter(pieces), np.array)
    assert np.array_equal(next(batches), images[:8])
    assert np.array_equal(next(batches), images[8:16])
    with pytest.raises(UserError, match=r"SIGKILL.*memory.*--workers") as error:
        next(batches)
    assert "\n" not in str(error.value)
    assert worker_processes() == []


def test_an_exception_in_a_worker_is_raised_at_its_batch(images, make_pool):
    pool = make_pool()
    reader = pool.reader(images, Fault(20, deadly=False))
    pieces = [(np.arange(start, start + 8), Plan()) for start in range(0, 40, 8)]
    batches = pool.batches(reader, iter(pieces), np.array)
    assert np.array_equal([next(batches), next(batches)], [images[:8], images[8:16]])
    with pytest.raises(RuntimeError, match="ArithmeticError: row 20 is no good"):
        next(batches)
    loader, plain = make_loader(images, pool), make_loader(images, None)
    assert_same(loader.epoch(), plain.epoch())  # the workers are none the worse for it


@pytest.mark.parametrize("fault", ["vanished", "truncated", "another file", "truncated later"])
def test_a_file_that_has_changed_is_named(images, make_pool, fault):
    file = Path(images.filename)
    pool = make_pool(1)
    loader = make_loader(images, pool, 4)
    batches = loader.epoch()
    if fault == "truncated later":  # a worker that reads what is no longer there gets a SIGBUS
        next(batches)
    if fault == "vanished":
        file.unlink()
    elif fault == "another file":
        file.rename(file.with_name("old.npy"))
        file.write_bytes(file.with_name("old.npy").read_bytes())
    else:
        os.truncate(file, 0)
    with pytest.raises(UserError) as error:
        list(batches)
    message = str(error.value)
    assert str(file) in message and "--resume" in message and "\n" not in message
    assert len(pool.said) == (fault == "truncated later")


@needs_shm
def test_little_shared_memory_means_fewer_slots(images, make_pool, monkeypatch):
    monkeypatch.setattr(shared_ring, "free_bytes", lambda: 3 * 4096 + 100)
    pool = make_pool(3)
    loader, plain = make_loader(images, pool), make_loader(images, None)
    assert_same(loader.epoch(), plain.epoch())
    assert read_ahead(pool, images) == 3
    (line,) = pool.said
    assert "3 batches" in line and "--shm-size" in line and "\n" not in line


@needs_shm
@pytest.mark.parametrize("moment", ["look", "reserve"])
def test_too_little_shared_memory_names_a_way_out(images, make_pool, monkeypatch, moment):
    if moment == "look":
        monkeypatch.setattr(shared_ring, "free_bytes", lambda: 2 * 4096 - 1)
    else:  # others have taken it meanwhile

        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = set(os.listdir(SHM))
    with pytest.raises(UserError) as error:
        next(make_loader(images, make_pool(1)).epoch())
    for flag in ("--workers 0", "--batch_size", "--shm-size"):
        assert flag in str(error.value)
    assert "\n" not in str(error.value) and set(os.listdir(SHM)) == before


def start_program(images, tmp_path, mode):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, program, images.filename, mode],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    (memory,) = shared_memory_of(process.pid)
    return process, memory, pids


@needs_shm
def test_nothing_is_left_when_the_training_process_is_killed(images, tmp_path):
    process, memory, pids = start_program(images, tmp_path, "held")
    assert process.stdout.readline() == "first\n"
    assert memory.exists() and len(pids) == 2
    process.kill()
    process.wait()
    wait_until(lambda: all(map(is_gone, pids)))
    wait_until(lambda: not memory.exists())
    process.stdin.close(), process.stdout.close(), process.stderr.close()


@needs_shm
def test_signals_to_the_whole_group_do_not_touch_the_workers(images, tmp_path):
    """Not even at the start, before they run Python; and the exit does not hang."""
    process, memory, pids = start_program(images, tmp_path, "whole")
    for _ in range(5):
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.05)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and err == ""
    assert out.split() == ["first", str(images.sum())]  # and no line about a dead worker
    assert all(map(is_gone, pids)) and not memory.exists()


def test_only_a_whole_map_of_a_file_can_be_opened_again(images):
    assert is_map(images)
    assert not is_map(images[3:]) and not is_map(np.array(images))
    assert not is_map(np.asarray(images))
    assert isinstance(images[3:], np.memmap)  # a memmap too, with the offset of the whole
