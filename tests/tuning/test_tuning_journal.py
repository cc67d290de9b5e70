"""The journal of a study: half a line, damage, a full disk, several writers."""

import errno
import json
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from small_disks import small_disk

from tuning.files import AGAIN, Journal, as_user_error, take_lock
from utils.errors import UserError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def test_lines_are_read_back(path):
    one, other = Journal(path), Journal(path)
    one.append_logs([{"a": 1}, {"b": "ä"}])
    assert other.read_logs(0) == [{"a": 1}, {"b": "ä"}]
    other.append_logs([{"c": 3}])
    assert one.read_logs(2) == [{"c": 3}] and one.read_logs(3) == []
    assert one.read_logs(1) == [{"b": "ä"}, {"c": 3}] and one.read_logs(0)[0] == {"a": 1}


@pytest.mark.parametrize("tail", [b'{"op": 1', b"\0" * 5000, b"x"])
def test_half_a_line_is_cut_off(path, tail):
    journal = Journal(path)
    journal.append_logs([{"a": 1}])
    with open(path, "ab") as file:
        file.write(tail)
    assert journal.read_logs(0) == [{"a": 1}] == Journal(path).read_logs(0)
    Journal(path).append_logs([{"b": 2}])
    assert journal.read_logs(1) == [{"b": 2}]
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n'


def test_damage_before_the_last_line_is_named(path):
    Journal(path).append_logs([{"a": 1}, {"b": 2}, {"c": 3}])
    path.write_bytes(path.read_bytes().replace(b'{"b"', b'#"b"'))
    with pytest.raises(UserError, match=f"{path}: line 2 is damaged"):
        Journal(path).read_logs(0)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_study_survives_any_truncation(path, cut):
    """What was recorded before the damaged line counts; the rest is done again."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def study():
        storage = JournalStorage(Journal(path))
        return optuna.create_study(storage=storage, study_name="s", load_if_exists=True)

    study().optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    content = path.read_bytes()
    path.write_bytes(content[: -cut * len(content) // 40])
    again = study()
    before = len(again.trials)
    again.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    assert len(study().trials) == before + 2
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    with small_disk(tmp_path / "small", "64k") as folder:
        journal = Journal(folder / "journal.jsonl")
        journal.append_logs([{"a": 1}])
        filler = folder / "filler"
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"0" * 4096)
        with pytest.raises(UserError, match="No space left on device"):
            journal.append_logs([{"long": "x" * 20_000}])
        filler.unlink()
        journal.append_logs([{"b": 2}])
        assert Journal(folder / "journal.jsonl").read_logs(0) == [{"a": 1}, {"b": 2}]


def test_a_line_of_which_only_a_part_fits_is_removed(path):
    journal = Journal(path)
    journal.append_logs([{"a": 1}])
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 200, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            journal.append_logs([{"b": "x" * 300}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b'{"a":1}\n'


def _write(path, name):
    journal = Journal(path)
    for number in range(50):
        journal.append_logs([{"by": name, "number": number}] * 2)
        journal.read_logs(0)


@pytest.mark.slow
def test_lines_of_many_writers_are_whole(path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, name)) for name in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    logs = Journal(path).read_logs(0)
    assert len(logs) == 300
    for name in range(3):
        numbers = [log["number"] for log in logs if log["by"] == name]
        assert numbers == sorted(numbers)


def test_a_folder_in_its_place_is_an_error(path):
    os.mkdir(path)
    with pytest.raises(UserError, match="Is a directory"):
        Journal(path).read_logs(0)


def test_a_lock_that_another_holds_is_not_one_that_cannot_be_taken(tmp_path, monkeypatch):
    held = take_lock(tmp_path / "lock")
    assert held is not None and take_lock(tmp_path / "lock") is None
    os.close(held)

    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="No locks available"):
        take_lock(tmp_path / "lock")


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (errno.ENOSPC, "; make room, then start"),
        (errno.EROFS, "; make /study writable, then start"),
        (errno.EIO, "; check the disk, then start"),
    ],
)
def test_an_error_says_what_to_do_about_it(number, way):
    with pytest.raises(UserError, match=way), as_user_error("x", Path("/study"), AGAIN):
        raise OSError(number, "text")
