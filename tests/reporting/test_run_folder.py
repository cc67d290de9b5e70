"""The run's folder: held by one process, refused if it has a run already, found again."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from utils.errors import UserError
from utils.reporting.run_folder import (
    RunFolder,
    SharedFolder,
    default_path,
    find_run,
    free_path,
)

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from utils.reporting.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
print("held", flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs/ is relative
    return tmp_path


def make_run(path, entry="resnet50_test.py", age=0) -> Path:
    path = Path(path)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"# {entry}\nepochs: 1\n", encoding="utf-8")
    os.utime(path / "config.yaml", (1e9 - age, 1e9 - age))
    return path


def test_a_second_process_is_refused_until_the_first_is_killed(here):
    path = here / "Läufe mit Leerzeichen" / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        for resume in (False, True):
            with pytest.raises(UserError, match="another run is using this folder"):
                RunFolder(path, resume=resume)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    folder = RunFolder(path)  # the lock has ended with its holder
    folder.close()


def test_lock_is_freed_on_close():
    first = RunFolder("run")
    with pytest.raises(UserError, match="another run"):
        RunFolder("run")
    first.close()
    RunFolder("run").close()


@pytest.fixture
def seconds(monkeypatch):
    """Functions to be called in place of each second that is waited for, the last one again and
    again."""
    said = [lambda: None]

    def sleep(time):
        assert time == 1
        (said.pop(0) if len(said) > 1 else said[0])()

    monkeypatch.setattr("utils.reporting.run_folder.time.sleep", sleep)
    return said


def test_the_lock_of_a_machine_that_has_died_is_waited_for(seconds):
    make_run("run")
    first, said = RunFolder("run", resume=True), []
    seconds[:] = [lambda: None, first.close, lambda: pytest.fail("it waits for a free lock")]
    folder = RunFolder("run", resume=True, wait=9, say=said.append)
    with pytest.raises(UserError, match="another run"):  # it is locked again
        RunFolder("run", resume=True)
    folder.close()
    assert said == ["run is locked, perhaps by a machine that has died: trying again for 9 s"]


def test_a_lock_that_stays_is_refused_in_the_end(seconds):
    first, said, waited = RunFolder("run"), [], []
    seconds[:] = [lambda: waited.append(1)]
    with pytest.raises(UserError, match="another run is using this folder"):
        RunFolder("run", wait=9, say=said.append)
    assert len(waited) == 9 and len(said) == 1
    first.close()


@pytest.mark.parametrize("output", ["run", "runs/new/run"])
def test_a_folder_that_another_machine_has_made_may_appear_late(seconds, monkeypatch, output):
    """As on NFS, which remembers that it was absent, until the folder above is opened."""
    path, listed = Path(output), []
    above = Path("runs") if path.parent.name else Path()
    above.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "listdir", listed.append)
    seconds[:] = [lambda: None, lambda: path.mkdir(parents=True), lambda: pytest.fail("late")]
    assert SharedFolder(path).path == path
    assert listed[0] == above and len(listed) == 2


def test_a_folder_that_another_machine_does_not_see_is_refused(seconds):
    waited = []
    seconds[:] = [lambda: waited.append(1)]
    with pytest.raises(UserError, match="not every machine sees this folder"):
        SharedFolder("run")
    assert len(waited) == 60 and not Path("run").exists()


def test_folder_with_a_run_is_refused_without_resume():
    path = make_run("run")
    for _ in range(2):  # the refusal itself holds no lock
        with pytest.raises(UserError, match="--resume run"):
            RunFolder(path)
    folder = RunFolder(path, resume=True)
    folder.close()
    assert path.is_dir()


def test_unused_folder_is_removed():
    folder = RunFolder("a/b/run")
    folder.log.write_text("said something\n")
    folder.close()
    assert not folder.path.exists()


@pytest.mark.parametrize("used_by", ["config.yaml", "summary.json", "checkpoints/step"])
def test_used_folder_stays(used_by):
    folder = RunFolder("run")
    (folder.path / used_by).parent.mkdir(exist_ok=True)
    (folder.path / used_by).write_text("x")
    folder.close()
    assert (folder.path / used_by).exists()


def test_a_folder_of_the_user_is_not_removed():
    Path("mine").mkdir()
    RunFolder("mine").close()
    assert Path("mine").is_dir()


@pytest.mark.parametrize("below", ["", "/run"])
def test_an_output_that_is_a_file_or_below_one_is_refused(below):
    Path("file").write_text("x")
    with pytest.raises(UserError, match="file is a file, not a folder; choose another one"):
        RunFolder(Path(f"file{below}"))


@pytest.mark.parametrize("below", ["", "/run"])
def test_an_output_that_is_a_link_to_nothing_or_below_one_is_refused(below):
    Path("link").symlink_to("nowhere")
    with pytest.raises(UserError, match="link is a link to nowhere, which does not exist; create"):
        RunFolder(Path(f"link{below}"))
    Path("nowhere").mkdir()
    RunFolder(Path(f"link{below}")).close()


def test_a_folder_that_cannot_be_written_is_an_error(monkeypatch):
    """As on a read-only file system: the superuser passes every other check."""

    def refuse(*arguments, **settings):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("utils.reporting.run_folder.os.open", refuse)
    with pytest.raises(UserError, match="--output run: Read-only file system"):
        RunFolder(Path("run"))


def test_the_default_path_is_never_an_existing_folder(monkeypatch):
    monkeypatch.setattr("utils.reporting.run_folder.time.strftime", lambda form: "20240101-120000")
    paths = []
    for _ in range(3):
        paths.append(default_path("resnet18", "shapes"))
        paths[-1].mkdir(parents=True)
    name = "resnet18-shapes-20240101-120000"
    assert [path.as_posix() for path in paths] == [
        f"runs/{name}",
        f"runs/{name}-2",
        f"runs/{name}-3",
    ]


def test_a_run_that_a_recipe_names_gets_a_number(tmp_path):
    named, said = tmp_path / "my.run", []
    path = free_path(named, {}, said.append)
    assert path == named and not said
    for number in (2, 3):
        path.mkdir()
        (path / "config.yaml").touch()
        path = free_path(named, {"SLURM_RESTART_COUNT": "0"}, said.append)
        assert path == tmp_path / f"my.run-{number}"
        assert said.pop() == f"note: {named} already holds a run, so this one is in {path}"
    for again in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        assert free_path(named, {again: "1"}, said.append) == named


def test_find_run_by_folder_and_by_checkpoint():
    run = make_run("some where/run")
    step = run / "checkpoints" / "step-00000012"
    step.mkdir(parents=True)
    assert find_run(str(run), None, "x.py") == run
    assert find_run(f"{run}/", None, "x.py") == run
    assert find_run(str(step), None, "x.py") == run
    with pytest.raises(UserError, match="--resume nowhere: no such folder"):
        find_run("nowhere", None, "x.py")


def test_find_run_auto_takes_the_output_folder():
    make_run("runs/newer")
    run = make_run("mine", age=100)
    assert find_run("auto", "mine", "resnet50_test.py") == run
    Path("empty").mkdir()
    for output in ("empty", "missing"):
        with pytest.raises(UserError, match=f"{output} holds no run"):
            find_run("auto", output, "resnet50_test.py")


def test_find_run_auto_takes_the_newest_of_its_entry():
    make_run("runs/a", age=30)
    newest = make_run("runs/b", age=10)
    make_run("runs/c", age=20)
    make_run("runs/other", entry="transformer_test.py")
    Path("runs/no-run").mkdir()
    assert find_run("auto", None, "resnet50_test.py") == newest
    with pytest.raises(UserError, match=r"no run of vit_test\.py below runs/"):
        find_run("auto", None, "vit_test.py")


def test_find_run_auto_without_any_runs():
    with pytest.raises(UserError, match="--resume FOLDER"):
        find_run("auto", None, "resnet50_test.py")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_can_be_used(here, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not RunFolder(here / "run").locked
    make_run(here / "old")
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder(here / "old")


def test_a_folder_whose_name_is_not_utf_8_is_refused(here):
    with pytest.raises(UserError, match="not UTF-8; choose another one"):
        RunFolder(Path(os.fsdecode(b"out\xe9")))


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(here, monkeypatch):
    make_run(here / "run")
    (here / "run" / "checkpoints").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="checkpoints cannot be read and written: change"):
        RunFolder(here / "run", resume=True)
