"""wandb: the figures, nothing private, and no failure ends the training."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import PATIENCE

from utils.errors import UserError
from utils.reporting import trackers
from utils.reporting.trackers import Wandb, run_id, wandb_mode, wandb_options
from utils.runs import records

ROOT = Path(__file__).resolve().parents[2]


def test_identity_is_kept_in_the_folder(tmp_path):
    first = run_id(tmp_path)
    assert first.isalnum() and run_id(tmp_path) == first
    assert run_id(tmp_path / "other") != first


def test_options_that_a_version_lacks_are_left_out():
    version = SimpleNamespace(model_fields={"console": None, "x_disable_stats": None})
    options = {"console": "off", "x_disable_stats": True, "x_later": 1}
    assert wandb_options(version, options) == {"console": "off", "x_disable_stats": True}


def test_this_version_has_every_option():
    wandb = pytest.importorskip("wandb", minversion="0.31")
    options = trackers.PRIVATE | trackers.LIMITS
    assert wandb_options(wandb.Settings, options) == options


WANDB = """
import signal, socket, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {root!r})
socket.gethostname = lambda: "secret-host"
from utils.errors import UserError
from utils.reporting import trackers
trackers.LIMITS |= {{"init_timeout": 2.0, "finish_timeout": 5.0}}
said = []
try:
    tracker = trackers.Wandb(
        Path(sys.argv[1]), mode=sys.argv[2], project="demo", name="a name",
        tags=["first", "second"],
        settings={{"lr": 0.125, "data_dir": Path("/home/secret-user/pictures")}}, warn=said.append,
    )
except UserError as error:
    sys.exit(f"UserError: {{error}}")
"""
RECORDS = """
for step in range(1, 4):
    tracker.log({"step": step, "epoch": step / 2, "split": "val", "loss": step / 4})
tracker.close()
tracker.log({"step": 9, "split": "val", "loss": 1.0})
print(said)
"""


def run_wandb(folder: Path, mode="offline", then=RECORDS, private=True, **environment):
    """Runs a program in a new repository; returns the finished process."""
    pytest.importorskip("wandb")
    place = folder / "secret-place"
    place.mkdir(exist_ok=True)
    head = place / ".git" / "HEAD"
    if not head.exists():
        subprocess.run(["git", "init", "-q", place], check=True)
        with open(place / ".git" / "config", "a", encoding="utf-8") as config:
            config.write('[remote "origin"]\n\turl = https://secret.example/secret-remote.git\n')
    program = place / "secret-program.py"
    text = WANDB.format(root=str(ROOT)) + then
    if not private:
        text = text.replace("said = []", "trackers.PRIVATE.clear(); said = []", 1)
    program.write_text(text, encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    clean |= {"HOME": str(folder), "NETRC": str(folder / "netrc"), "USER": "secret-user"}
    clean |= {"SECRET_TOKEN": "secret-token", "WANDB_SAVE_CODE": "true", "WANDB_DIR": str(place)}
    return subprocess.run(
        [sys.executable, program, folder / "run", mode, "--secret-argument"],
        cwd=place, env=clean | environment, capture_output=True, text=True, timeout=PATIENCE,
        start_new_session=True,
    )  # fmt: skip


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*.wandb")))


@pytest.mark.slow
def test_wandb_offline_holds_the_figures_and_nothing_private(tmp_path):
    result = run_wandb(tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")  # no other output
    content = written(tmp_path / "run" / "wandb")
    for public in (b"loss/val", b"0.75", b"demo", b"a name", b"second", b"pictures", b"0.125"):
        assert public in content, public
    assert b"secret" not in content
    assert str(ROOT).encode() not in content and sys.executable.encode() not in content
    assert len(socket.gethostname()) < 4 or socket.gethostname().encode() not in content
    for package in (b"matplotlib", b"pytest", b"safetensors"):
        assert package not in content
    # What would be uploaded besides: requirements.txt, code, wandb-metadata.json, output.log.
    files = [path for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".wandb", ".log", ""}
    assert not [path for path in files if path.parent.name == "files" or path.name == "output.log"]
    assert not [path for path in (tmp_path / "secret-place").rglob("*") if path.suffix == ".wandb"]


@pytest.mark.slow
def test_without_the_options_secrets_would_be_sent(tmp_path):
    """So the test above would find them."""
    assert run_wandb(tmp_path, private=False).returncode == 0
    content = written(tmp_path / "run")
    for secret in (b"secret-program", b"secret-argument", b"secret-host", b"secret-remote"):
        assert secret in content, secret


@pytest.mark.slow
def test_resumed_run_keeps_its_identity(tmp_path):
    for _ in range(2):
        assert run_wandb(tmp_path).returncode == 0
        time.sleep(1)  # wandb's folders are named by the second
    names = {path.name for path in (tmp_path / "run" / "wandb").rglob("*.wandb")}
    assert names == {f"run-{run_id(tmp_path / 'run')}.wandb"}
    assert len(list((tmp_path / "run" / "wandb").rglob("*.wandb"))) == 2


@pytest.mark.parametrize(
    ("flag", "variable", "mode"),
    [
        ("online", "", "online"),
        ("online", "online", "online"),
        ("online", "offline", "offline"),
        ("online", "dryrun", "offline"),
        ("online", "disabled", "disabled"),
        ("offline", "Disabled", "disabled"),
        ("offline", "online", "offline"),
        ("disabled", "online", "disabled"),
        ("online", "shared", "online"),
    ],
)
def test_the_environment_may_only_take_back_what_is_sent(monkeypatch, flag, variable, mode):
    lines = []
    monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode(flag, lines.append) == mode
    assert lines == ([f"note: --wandb {mode}, as WANDB_MODE says"] if mode != flag else [])


def test_a_run_that_the_environment_disables_has_no_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(records, "TensorBoard", lambda *_, **__: "tensorboard")
    monkeypatch.setattr(records, "Wandb", lambda **_: pytest.fail("it is started"))
    lines = []
    settings = SimpleNamespace(wandb="online", trackers="tensorboard")
    folder = SimpleNamespace(path=tmp_path, tensorboard=tmp_path / "tensorboard")
    assert records._trackers(settings, folder, 0, lines.append) == ["tensorboard"]
    assert lines == ["note: --wandb disabled, as WANDB_MODE says"]


def test_the_team_and_the_mode_are_passed_on(tmp_path, monkeypatch):
    """With a stand-in for wandb."""
    given = {}
    run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)
    fake = SimpleNamespace(
        Settings=SimpleNamespace, setup=lambda settings: None, teardown=lambda: None,
        init=lambda **arguments: given.update(arguments) or run,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trackers, "wandb_options", lambda settings, options: {})
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    for mode in ("online", "offline"):
        Wandb(tmp_path, mode=mode, project="p", entity="a team").close()
        assert (given["mode"], given["entity"], given["project"]) == (mode, "a team", "p")


def test_a_missing_login_is_reported_in_one_line(tmp_path):
    result = run_wandb(tmp_path, mode="online")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("UserError: --wandb online: ")
    assert "wandb login" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_a_missing_network_is_reported_in_one_line(tmp_path, server):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if server == "refuses":
            listening.close()
        result = run_wandb(
            tmp_path, mode="online", WANDB_API_KEY="0" * 40,
            WANDB_BASE_URL=f"http://127.0.0.1:{port}",
        )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("UserError: --wandb online: "), result.stderr
    assert "--wandb offline" in result.stderr and result.stderr.count("\n") == 1


KILL_SERVICE = """
import os, time
def children():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                yield int(name)
for child in list(children()):
    os.kill(child, signal.SIGKILL)
time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_death_of_wandbs_process_is_reported_once_and_training_goes_on(tmp_path):
    result = run_wandb(tmp_path, then=KILL_SERVICE + RECORDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("continues without it") == 1
    assert "Traceback" not in result.stderr


CTRL_C = """
import os, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
os.killpg(0, signal.SIGINT)
time.sleep(0.3)
"""


@pytest.mark.slow
def test_ctrl_c_reaches_the_whole_group_and_the_last_records_are_kept(tmp_path):
    result = run_wandb(tmp_path, then=CTRL_C + RECORDS)
    assert (result.returncode, result.stdout) == (0, "interrupted\n[]\n"), result.stderr
    assert b"0.75" in written(tmp_path)


@pytest.mark.parametrize("wrong", [{"project": "a/b"}, {"project": "p", "tags": ["x" * 65]}])
def test_names_that_wandb_refuses(tmp_path, wrong):
    pytest.importorskip("wandb")
    with pytest.raises(UserError, match=r"--wandb offline: .*--wandb disabled") as caught:
        Wandb(tmp_path, mode="offline", **wrong)
    assert "\n" not in str(caught.value)
