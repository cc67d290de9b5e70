"""A checkpoint is whole or absent whatever happens while it is written: kills, full disks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from small_checkpoints import example, quiet
from small_disks import small_disk
from toy import make_trainer

from utils.errors import UserError

ROOT = Path(__file__).parents[2]
# The child writes three checkpoints; then, for each folder that it is sent, step 4 twice.
CHILD = """
import sys, os
sys.path.insert(0, {tests!r})
from small_checkpoints import example, quiet
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


@pytest.mark.slow
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


@pytest.mark.slow
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
def disk(tmp_path):
    """A folder with room for 300 KiB."""
    with small_disk(tmp_path / "disk", "300k") as folder:
        yield folder


def fill(path):
    """Takes all the room that is left."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(file, bytes(512))
    os.close(file)


def test_a_full_disk_is_reported_and_the_run_goes_on(disk, capsys):
    trainer = make_trainer(disk / "run", save_steps=3, epochs=4)
    ballast = disk / "ballast"
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
    assert 3 in steps and 6 not in steps and trainer.plan.total_steps in steps
    assert trainer.saver.store.load().step == trainer.plan.total_steps
    metrics = (disk / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["step"] for line in metrics]
    assert logged == sorted(logged) and logged[-1] == trainer.plan.total_steps
    assert set(range(2, trainer.plan.total_steps + 1, 2)) <= set(logged)


def test_a_full_disk_at_the_end_is_reported_in_one_line(disk):
    trainer = make_trainer(disk / "run", save_steps=6, epochs=2)
    real_save = trainer.save

    def save(final=False):
        if final:
            trainer.saver.wait()
            fill(disk / "ballast")
        real_save(final)

    trainer.save = save
    with pytest.raises(
        UserError, match=r"No space left .* step 6 is intact; make room and --resume"
    ):
        trainer.fit()
    assert trainer.saver.store.load().step == 6
