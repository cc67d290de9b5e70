"""TensorBoard and wandb: right charts, nothing private, and never the end of a training."""

import contextlib
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until

from utils.errors import UserError
from utils.reporting import trackers
from utils.reporting.metrics import MetricsLog
from utils.reporting.trackers import TensorBoard, Wandb, figures, run_id, wandb_options

ROOT = Path(__file__).resolve().parents[2]


needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard"
)


def window(step, **more):
    return {"step": step, "epoch": step / 10, "split": "train", "average_over": "steps"} | more


# ---- names ------------------------------------------------------------------------------------


def test_names_of_the_charts():
    record = window(3, loss=1.0, lr=0.1, accuracy=50, skipped_steps=0)
    assert figures(record) == {
        "loss/train_steps": 1.0,
        "accuracy/train_steps": 50.0,
        "skipped_steps/train_steps": 0.0,
        "lr": 0.1,
    }
    ended = {"step": 3, "epoch": 1.0, "split": "train", "average_over": "epoch"}
    ended |= {"loss": 1.0, "time_share": {"data": 0.25, "other": None}}
    assert figures(ended) == {"loss/train": 1.0, "time_share/data": 0.25}
    test = {"step": 3, "epoch": 1.0, "split": "test", "loss": 2.0, "samples": 100}
    assert figures(test) == {"loss/test": 2.0}
    assert figures(test | {"model": "average"}) == {"loss/test_average": 2.0}


def test_what_is_no_figure_is_left_out():
    nothing = {"a": None, "b": float("nan"), "c": float("inf"), "d": "text", "e": True, "f": [1.0]}
    assert figures(window(1, **nothing)) == {}
    assert figures({"step": 1, "epoch": 0.1, "split": "event", "event": "unfrozen"}) == {}


# ---- TensorBoard ------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(size: int):
    """See test_metrics.py."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back after the test


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself shows: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    shown = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    found = {
        tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]
    }
    for tag in shown.Tags()["tensors"]:
        found[tag] = [(e.step, float(make_ndarray(e.tensor_proto))) for e in shown.Tensors(tag)]
    return found


@needs_tensorboard
def test_tensorboard_shows_every_record(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=[TensorBoard(tmp_path / "tb")])
    for step in (1, 2):
        log.write(**window(step, loss=step / 2, lr=0.125))
    log.write(step=2, epoch=0.2, split="val", loss=0.75, accuracy=float("nan"))
    log.close()
    assert events(tmp_path / "tb") == {
        "loss/train_steps": [(1, 0.5), (2, 1.0)],
        "lr": [(1, 0.125), (2, 0.125)],
        "loss/val": [(2, 0.75)],
    }


@needs_tensorboard
def test_tensorboard_drops_what_a_resumed_run_does_again(tmp_path):
    first = TensorBoard(tmp_path)
    for step in range(1, 8):
        first.log(window(step, loss=1.0))
    first.close()
    time.sleep(1.1)  # event files are ordered by the second in their names
    resumed = TensorBoard(tmp_path, purge_step=4)  # the checkpoint is of step 3
    resumed.log(window(4, loss=2.0))
    resumed.close()
    assert events(tmp_path)["loss/train_steps"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


@needs_tensorboard
def test_tensorboard_sees_a_running_run_and_a_killed_one(tmp_path):
    program = (
        "import sys, time; from utils.reporting.trackers import TensorBoard\n"
        "board = TensorBoard(sys.argv[1])\n"
        "for step in range(3): board.log({'step': step, 'split': 'val', 'loss': 1.5})\n"
        "print('logged', flush=True); time.sleep(3600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "logged\n"
        wait_until(lambda: len(events(tmp_path).get("loss/val", [])) == 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert events(tmp_path)["loss/val"] == [(0, 1.5), (1, 1.5), (2, 1.5)]


@needs_tensorboard
def test_full_disk_is_said_once_and_neither_raises_nor_hangs(tmp_path, capfd):
    said = []
    board = TensorBoard(tmp_path, warn=said.append)
    board.log(window(1, loss=1.0))
    wait_until(lambda: "loss/train_steps" in events(tmp_path))
    with full_disk(next(tmp_path.iterdir()).stat().st_size + 10):
        done = threading.Event()

        def go_on():  # past the length of the queue
            for step in range(2, 3000):
                board.log(window(step, loss=1.0))
            board.close()
            done.set()

        threading.Thread(target=go_on, daemon=True).start()
        assert done.wait(PATIENCE), "log() or close() waits for ever"
    assert len(said) == 1 and "goes on without it" in said[0]
    assert capfd.readouterr().err == ""  # no traceback amid the progress bar
    assert events(tmp_path)["loss/train_steps"] == [(1, 1.0)]  # half a record at the end is no harm


@needs_tensorboard
def test_full_disk_at_the_last_record(tmp_path):
    said = []
    board = TensorBoard(tmp_path, warn=said.append)
    with full_disk(1):
        board.log(window(1, loss=1.0))
        board.close()
    board.log(window(2, loss=1.0))  # after close: nothing
    board.close()
    assert len(said) <= 1


@needs_tensorboard
@pytest.mark.parametrize("where", ["a file", "a full disk"])
def test_tensorboard_that_cannot_start(tmp_path, where):
    said = []
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" / "tb" if where == "a file" else tmp_path / "tb"
    with full_disk(1) if where == "a full disk" else contextlib.nullcontext():
        board = TensorBoard(folder, warn=said.append)
        board.log(window(1, loss=1.0))
        board.close()
    assert len(said) == 1 and str(folder) in said[0] and "\n" not in said[0]


@needs_tensorboard
def test_other_threads_keep_their_tracebacks(tmp_path, capsys):
    told = []
    threading.excepthook = told.append
    board = TensorBoard(tmp_path)
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    board.close()
    assert len(told) == 1 and told[0].exc_type is ZeroDivisionError


@pytest.mark.parametrize(
    ("module", "make", "said"),
    [
        ("tensorboard", lambda path: TensorBoard(path), "pip install -r requirements.txt"),
        (
            "wandb",
            lambda path: Wandb(path, mode="offline", project="p"),
            "--wandb.*pip install wandb",
        ),
    ],
)
def test_missing_package(tmp_path, monkeypatch, module, make, said):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=said):
        make(tmp_path)


# ---- wandb ------------------------------------------------------------------------------------


def test_identity_is_kept_in_the_folder(tmp_path):
    first = run_id(tmp_path)
    assert first.isalnum() and run_id(tmp_path) == first
    assert run_id(tmp_path / "other") != first


def test_options_of_other_versions():
    class Old:
        model_fields = None
        __annotations__ = {"console": str, "_disable_stats": bool}

    options = {"console": "off", "x_disable_stats": True, "x_later": 1, "finish_timeout": 3.0}
    assert wandb_options(Old, options) == {"console": "off", "_disable_stats": True}


def test_this_version_has_every_option():
    wandb = pytest.importorskip("wandb", minversion="0.31")
    options = trackers.PRIVATE | trackers.LIMITS
    assert wandb_options(wandb.Settings, options) == options


WANDB = """
import signal, socket, sys
from pathlib import Path
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
    """A program of its own in a repository of its own; returns the finished process."""
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


def test_wandb_offline_holds_the_figures_and_nothing_private(tmp_path):
    result = run_wandb(tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")  # no chatter
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
def test_without_the_options_the_secrets_would_be_there(tmp_path):
    """That the test above would see them."""
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


def test_online_without_a_login_is_one_line(tmp_path):
    result = run_wandb(tmp_path, mode="online")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("UserError: --wandb online: ")
    assert "wandb login" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_online_without_a_network_is_one_line(tmp_path, server):
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_death_of_wandbs_process_is_said_once_and_the_training_goes_on(tmp_path):
    result = run_wandb(tmp_path, then=KILL_SERVICE + RECORDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("goes on without it") == 1
    assert "Traceback" not in result.stderr


CTRL_C = """
import os, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
os.killpg(0, signal.SIGINT)
time.sleep(0.3)
"""


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
