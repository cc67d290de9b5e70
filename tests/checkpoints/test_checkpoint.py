"""Checkpoints: verified before use, whole or absent whatever happens while they are written."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from safetensors.torch import load_file
from toy import make_trainer, network

from utils.checkpoints.checkpoint import Checkpoint, Checkpoints, DamagedCheckpoint, read_checkpoint
from utils.errors import UserError

ROOT = Path(__file__).parents[2]


def example(step=1, value=1.0) -> Checkpoint:
    model = {"a.weight": torch.full((3, 4), value), "a.count": torch.tensor(step)}
    return Checkpoint(step, model, {"a.weight/momentum_buffer": torch.ones(3, 4)}, {"step": step})


def quiet(folder, **options) -> Checkpoints:
    said = []
    store = Checkpoints(folder, warn=said.append, **options)
    store.said = said
    return store


def test_round_trip(tmp_path):
    store = quiet(tmp_path)
    store.save(example(7))
    loaded = store.load()
    assert loaded.step == 7 and loaded.state == {"step": 7} and not store.said
    for name, tensor in example(7).model.items():
        assert torch.equal(loaded.model[name], tensor)


def test_none_yet(tmp_path):
    assert quiet(tmp_path / "absent").load() is None


def test_sums_are_those_of_sha256sum(tmp_path):
    path = quiet(tmp_path).save(example())
    for line in (path / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest


def test_weights_are_the_same_bytes_and_open_anywhere(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit()
    path = tmp_path / "checkpoints" / f"step-{trainer.total_steps:08}" / "model.safetensors"
    plain = network()
    plain.load_state_dict(load_file(path))  # canonical names, no prefix
    program = (
        "import sys, torch; from safetensors.torch import load_file; "
        "from pathlib import Path; from utils.checkpoints.checkpoint import *; "
        "model = load_file(sys.argv[1]); shuffled = dict(reversed(model.items())); "
        "Checkpoints(Path(sys.argv[2])).save(Checkpoint(1, shuffled, {}, {}))"
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


def test_damage_falls_back_and_says_so(tmp_path):
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


def test_the_newest_and_the_best_stay(tmp_path):
    store = quiet(tmp_path, keep=2)
    for step in range(1, 8):
        store.save(example(step), best_step=3 if step >= 3 else None)
    assert store.steps() == [3, 6, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{step:08}" for step in (3, 6, 7)]


def test_the_same_step_again_replaces_it(tmp_path):
    store = quiet(tmp_path)
    store.save(example(5, 1.0))
    store.save(example(5, 2.0))
    assert store.load().model["a.weight"][0, 0] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    # A kill between the two renames leaves the old one under its other name.
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old")
    assert store.load().step == 5


def test_saving_behind_a_damaged_one_keeps_the_new_and_drops_the_damaged(tmp_path):
    store = quiet(tmp_path, keep=1)
    store.save(example(80), best_step=80)
    store.save(example(100), best_step=80)
    (tmp_path / "step-00000100" / "model.safetensors").write_bytes(b"damaged")
    assert store.load().step == 80
    store.save(example(90), best_step=80)
    assert store.steps() == [80, 90]
    store.said.clear()
    assert store.load().step == 90 and not store.said


def test_a_lone_old_one_is_in_nobodys_way(tmp_path):
    store = quiet(tmp_path, keep=2)
    store.save(example(5))
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old")
    for step in (10, 15, 20):
        store.save(example(step))
    assert store.steps() == [15, 20] and not list(tmp_path.glob("*.old"))
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000020.old")
    store.save(example(20, 3.0))
    assert store.load().model["a.weight"][0, 0] == 3.0 and not list(tmp_path.glob("*.old"))


# What the child does: three checkpoints stand; it waits to be told, then writes step 4, and again.
CHILD = """
import sys, os
sys.path.insert(0, {tests!r})
from test_checkpoint import example, quiet
from pathlib import Path
folder = Path(sys.argv[1])
store = quiet(folder, keep=2)
for step in (1, 2, 3):
    store.save(example(step, float(step)))
print("ready", flush=True)
while True:
    if not (name := sys.stdin.readline().strip()):
        break
    pid = os.fork()
    if pid == 0:
        if os.read(0, 1) != b"g":
            os._exit(9)
        store.folder = Path(name)
        store.save(example(4, 4.0))
        store.save(example(4, 5.0))
        os._exit(0)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(status, flush=True)
"""
CALLS = ("mkdir", "openat", "write", "fsync", "rename", "unlinkat", "rmdir", "close")


def good_state(folder: Path) -> None:
    """Whatever happened, a whole checkpoint is there, and the next save works."""
    store = quiet(folder, keep=2)
    loaded = store.load()
    assert not store.said, "a half-written checkpoint looks like a real one"
    assert loaded.step in (3, 4)
    expected = {3: (3.0,), 4: (4.0, 5.0)}[loaded.step]
    assert loaded.model["a.weight"][0, 0].item() in expected
    store.save(example(9))
    assert store.load().step == 9
    assert not [p for p in folder.iterdir() if not p.name.startswith("step-")]


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
@pytest.mark.parametrize(
    "stride", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["every fifth", "all"]
)
def test_sigkill_at_system_calls(tmp_path, stride):
    """strace kills the writer as it enters the n-th file operation, for every n or every fifth."""
    original = tmp_path / "original"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(tests=str(Path(__file__).parent)), original],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert child.stdout.readline() == b"ready\n"
    killed = dict.fromkeys(CALLS, 0)
    for call in CALLS:
        for n in range(1, 100, stride):
            folder = tmp_path / f"{call}{n}"
            shutil.copytree(original, folder)
            child.stdin.write(f"{folder}\n".encode())
            pid = int(child.stdout.readline())
            tracer = subprocess.Popen(
                ["strace", "-p", str(pid), "-e", f"trace={call}",
                 "-e", f"inject={call}:signal=SIGKILL:when={n}"],
                stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            if b"attached" not in tracer.stderr.readline():
                child.kill()
                pytest.skip("strace may not attach to a process here")
            child.stdin.write(b"g")
            status = int(child.stdout.readline())
            tracer.wait(PATIENCE)
            good_state(folder)
            shutil.rmtree(folder)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed[call] += 1
    child.stdin.close()
    child.wait(PATIENCE)
    if stride == 1:
        assert killed["write"] >= 8 and killed["fsync"] >= 12 and killed["rename"] >= 4, killed
        assert sum(killed.values()) > 60, killed
    assert all(killed[call] for call in ("write", "fsync", "rename")), killed


KILL_AT_FSYNC_OR_RENAME = """
import os, signal, itertools
count = itertools.count(1)
def dying(call):
    def wrapped(*args, **kwargs):
        if next(count) == {n}:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped
os.fsync, os.rename, os.rmdir, os.unlink = map(dying, (os.fsync, os.rename, os.rmdir, os.unlink))
"""


def test_kill_at_every_flush_and_rename_without_strace(tmp_path):
    """The same by hooks on Python's calls, in forks of this process."""
    killed = 0
    for n in range(1, 100):
        folder = tmp_path / str(n)
        store = quiet(folder, keep=2)
        for step in (1, 2, 3):
            store.save(example(step, float(step)))
        pid = os.fork()
        if pid == 0:
            try:
                exec(KILL_AT_FSYNC_OR_RENAME.format(n=n), {})
                store.save(example(4, 4.0))
                store.save(example(4, 5.0))
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        good_state(folder)
        if os.WIFEXITED(status):
            break
        killed += 1
    assert killed > 10


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 300 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(path):
    """Takes all the room that is left."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(file, bytes(512))
    os.close(file)


def test_full_disk_is_said_and_the_run_goes_on(small_disk, capsys):
    trainer = make_trainer(small_disk / "run", save_steps=3, epochs=4)
    ballast = small_disk / "ballast"
    real_save, calls = trainer.save, []

    def save(final=False):
        trainer.saver.wait()
        if len(calls) == 1:  # the second checkpoint finds the disk full
            fill(ballast)
        elif len(calls) == 3:
            ballast.unlink()
        calls.append(trainer.progress.step)
        real_save(final)

    trainer.save = save
    trainer.fit()
    said = capsys.readouterr().out
    assert "no checkpoint of step 6: No space left on device; that of step 3 is intact" in said
    assert "the run goes on and tries again" in said
    steps = trainer.saver.store.steps()
    assert 3 in steps and 6 not in steps and trainer.total_steps in steps
    assert trainer.saver.store.load().step == trainer.total_steps
    metrics = (small_disk / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["step"] for line in metrics]
    assert logged == sorted(logged) and logged[-1] == trainer.total_steps
    assert set(range(2, trainer.total_steps + 1, 2)) <= set(logged)


def test_full_disk_at_the_end_is_one_line(small_disk):
    trainer = make_trainer(small_disk / "run", save_steps=6, epochs=2)
    real_save = trainer.save

    def save(final=False):
        if final:
            trainer.saver.wait()
            fill(small_disk / "ballast")
        real_save(final)

    trainer.save = save
    with pytest.raises(
        UserError, match=r"No space left .* step 6 is intact; make room and --resume"
    ):
        trainer.fit()
    assert trainer.saver.store.load().step == 6


def test_folders_with_other_names_are_no_checkpoints(tmp_path):
    for name in ("step-", "step-last", "step-1e3", ".writing-step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    assert quiet(tmp_path).steps() == [] and quiet(tmp_path).load() is None
