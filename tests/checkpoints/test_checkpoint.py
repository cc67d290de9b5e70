"""Checkpoints: verified before use, the newest and the best kept."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import example, quiet
from toy import make_trainer, network

from utils.checkpoints.checkpoint import DamagedCheckpoint, read_checkpoint
from utils.errors import UserError
from utils.files import file_sum, sums_text

ROOT = Path(__file__).parents[2]


def test_round_trip(tmp_path):
    store = quiet(tmp_path)
    store.save(example(7))
    loaded = store.load()
    assert loaded.step == 7 and loaded.state == {"step": 7} and not store.said
    for name, tensor in example(7).model.items():
        assert torch.equal(loaded.model[name], tensor)


def test_a_new_folder_has_no_checkpoint(tmp_path):
    assert quiet(tmp_path / "absent").load() is None


def test_sums_are_those_of_sha256sum(tmp_path):
    path = quiet(tmp_path).save(example())
    for line in (path / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_weights_are_the_same_bytes_and_open_anywhere(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit()
    path = tmp_path / "checkpoints" / f"step-{trainer.plan.total_steps:08}" / "model.safetensors"
    plain = network()
    plain.load_state_dict(load_file(path))  # canonical names, no prefix
    program = (
        "import sys, torch; from safetensors.torch import load_file; "
        "from pathlib import Path; from utils.checkpoints.checkpoint import *; "
        "model = load_file(sys.argv[1]); shuffled = dict(reversed(model.items())); "
        "parts = {'model': shuffled, 'optimizer': {}}; "
        "Checkpoints(Path(sys.argv[2])).save(Checkpoint(1, {}, parts))"
    )
    subprocess.run([sys.executable, "-c", program, path, tmp_path / "other"], check=True, cwd=ROOT)
    again = tmp_path / "other" / "step-00000001" / "model.safetensors"
    assert again.read_bytes() == path.read_bytes()


def test_every_flipped_bit_and_truncation_is_detected(tmp_path):
    """Every byte of the small files and of the header of the weights, one bit each."""
    path = quiet(tmp_path).save(example())
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << (position % 8)
            file.write_bytes(bad)
            with pytest.raises(DamagedCheckpoint):
                read_checkpoint(path)
        for length in (0, 1, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:length])
            with pytest.raises(DamagedCheckpoint):
                read_checkpoint(path)
        file.write_bytes(good + b"\n")
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(path)
        file.unlink()
        with pytest.raises(DamagedCheckpoint, match="No such file"):
            read_checkpoint(path)
        file.write_bytes(good)
    assert read_checkpoint(path).step == 1


def test_a_damaged_one_is_reported_and_an_earlier_one_is_loaded(tmp_path):
    store = quiet(tmp_path)
    for step in (1, 2, 3):
        store.save(example(step, float(step)))
    for step in (2, 3):
        with open(tmp_path / f"step-{step:08}" / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x00")
    loaded = store.load()
    assert loaded.step == 1 and len(store.said) == 2
    assert "step-00000003 is damaged (model.safetensors" in store.said[0]
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(UserError, match=r"all checkpoints .* are damaged"):
        store.load()


@pytest.mark.parametrize(
    "number",
    [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE],
)
def test_what_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch, number):
    """An older checkpoint would be loaded in its place, and it would be pruned later."""
    store = quiet(tmp_path)
    for step in (1, 2):
        store.save(example(step, float(step)))

    def file_sum(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("utils.checkpoints.checkpoint.file_sum", file_sum)
    with pytest.raises(UserError, match=rf"step-00000002.*: {os.strerror(number)}; try again"):
        store.load()
    assert store.steps() == [1, 2] and not store.said


def test_nor_is_what_cannot_be_opened_again(tmp_path, monkeypatch):
    """safetensors says "No such file", without a number, if too many files are open."""
    store = quiet(tmp_path)
    for step in (1, 2):
        store.save(example(step))

    def read_part(*_):
        raise FileNotFoundError("No such file or directory: model.safetensors")

    monkeypatch.setattr("utils.checkpoints.checkpoint.read_part", read_part)
    with pytest.raises(UserError, match=r"step-00000002.*: No such file.*; try again"):
        store.load()
    assert not store.said


def place(**entries) -> dict:
    """state.json of a checkpoint whose only weights are rows of a larger tensor."""
    whole = {"shape": [3, 4], "offset": [0, 0]} | entries
    entry = {key: value for key, value in whole.items() if value is not None}
    return {"shards": {"model.safetensors": {"a.weight": entry}}}


@pytest.mark.parametrize(
    "state",
    [
        [],
        None,
        {"shards": [1]},
        {"progress": []},
        {"settings": "fast"},
        {"shards": {"model.safetensors": 7}},
        place(offset=None),
        place(shape=None),
        place(offset=[]),
        place(offset=["0", 0]),
        place(offset=[1, 0]),
        place(shape=[4_000_000_000_000, 4]),
        place(shape=[3, 4_000_000_000_000]),
        "deeply nested",
    ],
)
def test_what_no_save_has_written_is_damaged_although_its_sums_are_right(tmp_path, state):
    store = quiet(tmp_path)
    store.save(example(1))
    path = store.save(example(2))
    text = "[" * 100_000 + "]" * 100_000 if state == "deeply nested" else json.dumps(state)
    write_state(path, text)
    with pytest.raises(DamagedCheckpoint, match=r"^malformed: "):
        read_checkpoint(path)
    assert store.load().step == 1 and len(store.said) == 1


def test_rows_that_the_state_places_rightly_are_read(tmp_path):
    path = quiet(tmp_path).save(example(1))
    write_state(path, json.dumps(place()))
    assert torch.equal(read_checkpoint(path).model["a.weight"], example(1).model["a.weight"])


def write_state(path: Path, text: str) -> None:
    """Replaces state.json, and its sum."""
    (path / "state.json").write_text(text)
    names = [file.name for file in path.iterdir() if file.name != "SHA256SUMS"]
    sums = {name: file_sum(path / name) for name in names}
    (path / "SHA256SUMS").write_bytes(sums_text(sums))


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = quiet(tmp_path, keep=2)
    for step in range(1, 8):
        store.save(example(step), best_step=3 if step >= 3 else None)
    assert store.steps() == [3, 6, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{step:08}" for step in (3, 6, 7)]


def test_the_best_one_stays_if_a_better_one_could_not_be_written(tmp_path):
    store = quiet(tmp_path, keep=1)
    for step, best in ((1, 1), (2, 1), (4, 3), (5, 3)):  # the disk was full at step 3
        store.save(example(step), best_step=best)
    assert store.steps() == [1, 5]
    store.save(example(6), best_step=6)
    store.save(example(7), best_step=6)
    assert store.steps() == [6, 7]


def as_in_a_run(step, best):
    checkpoint = example(step)
    checkpoint.state["progress"] = {"best_step": best}
    return checkpoint


def test_it_stays_even_if_the_run_is_resumed_before_the_next_one_is_written(tmp_path):
    for step, best in ((1, 1), (2, 1), (4, 3)):  # the disk was full at step 3
        quiet(tmp_path, keep=1).save(as_in_a_run(step, best), best)
    quiet(tmp_path, keep=1).save(as_in_a_run(5, 3), 3)
    store = quiet(tmp_path, keep=1)
    assert store.steps() == [1, 5] and store.existing_best(3, newest=5) == 1
    store.save(as_in_a_run(6, 6), 6)
    store.save(as_in_a_run(7, 6), 6)
    assert store.steps() == [6, 7] and store.existing_best(None, newest=7) is None


def test_a_best_one_of_damaged_steps_is_not_gone_back_to(tmp_path):
    """The run was resumed before them, so its best one is another."""
    store = quiet(tmp_path, keep=9)
    for step, best in ((1, 1), (2, 1), (9, 9)):
        store.save(as_in_a_run(step, best), best)
    (tmp_path / "step-00000002" / "state.json").unlink()
    (tmp_path / "step-00000001" / "state.json").write_text("[]")
    assert store.existing_best(3, newest=5) is None
    assert store.existing_best(3, newest=9) == 9


def test_the_best_one_is_kept_and_copied_under_its_other_name(tmp_path):
    """A kill between two renames has left it there."""
    folder = tmp_path / "one"
    quiet(folder).save(as_in_a_run(1, 1), 1)
    (folder / "step-00000001").rename(folder / "step-00000001.old")
    store = quiet(folder, keep=1)
    assert store.path(1) == folder / "step-00000001.old"
    for step in (2, 3):
        store.save(as_in_a_run(step, 1), 1)
    assert store.steps() == [1, 3] and store.path(1).is_dir()
    other = quiet(tmp_path / "other")
    other.adopt(folder, 1)
    assert other.load().step == 1 and other.path(1) == tmp_path / "other" / "step-00000001"
    store.save(as_in_a_run(1, 1), 1)  # whole again: the other name is not needed any more
    assert store.path(1).name == "step-00000001" and not list(folder.glob("*.old"))


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    quiet(tmp_path / "one").save(example(1))
    store, written = quiet(tmp_path / "other"), []

    def write(path, content):
        written.append(path)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr("utils.checkpoints.checkpoint.write_synced", write)
    with pytest.raises(OSError, match="No space"):
        store.adopt(tmp_path / "one", 1)
    assert len(written) == 2 and not list((tmp_path / "other").iterdir())


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    store = quiet(tmp_path)
    store.save(example(5, 1.0))
    store.save(example(5, 2.0))
    assert store.load().model["a.weight"][0, 0] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    # A kill between the two renames leaves the old one under its other name.
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old")
    assert store.load().step == 5


def test_saving_after_a_damaged_one_keeps_the_new_and_drops_the_damaged(tmp_path):
    store = quiet(tmp_path, keep=1)
    store.save(example(80), best_step=80)
    store.save(example(100), best_step=80)
    (tmp_path / "step-00000100" / "model.safetensors").write_bytes(b"damaged")
    assert store.load().step == 80
    store.save(example(90), best_step=80)
    assert store.steps() == [80, 90]
    store.said.clear()
    assert store.load().step == 90 and not store.said


def test_what_a_kill_left_under_the_other_name_is_removed(tmp_path):
    store = quiet(tmp_path, keep=2)
    store.save(example(5))
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old")
    for step in (10, 15, 20):
        store.save(example(step))
    assert store.steps() == [15, 20] and not list(tmp_path.glob("*.old"))
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000020.old")
    store.save(example(20, 3.0))
    assert store.load().model["a.weight"][0, 0] == 3.0 and not list(tmp_path.glob("*.old"))


def test_folders_with_other_names_are_no_checkpoints(tmp_path):
    for name in ("step-", "step-last", "step-1e3", ".writing-step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    assert quiet(tmp_path).steps() == [] and quiet(tmp_path).load() is None
