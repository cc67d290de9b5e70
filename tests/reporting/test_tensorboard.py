"""TensorBoard: right charts during a run, and no failure ends the training."""

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until
from small_disks import full_disk
from trackers_records import window

from utils.reporting.metrics import MetricsLog
from utils.reporting.trackers import TensorBoard

ROOT = Path(__file__).resolve().parents[2]
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard"
)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: tag -> [(step, value)]."""
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
def test_tensorboard_drops_steps_that_a_resumed_run_repeats(tmp_path):
    first = TensorBoard(tmp_path)
    for step in range(1, 8):
        first.log(window(step, loss=1.0))
    first.close()
    (file,) = tmp_path.iterdir()  # events.out.tfevents.<second>.<host>..., read in this order
    *start, second, rest = file.name.split(".", 4)
    file.rename(tmp_path / ".".join([*start, str(int(second) - 2), rest]))
    resumed = TensorBoard(tmp_path, purge_step=4)  # the checkpoint is of step 3
    resumed.log(window(4, loss=2.0))
    resumed.close()
    assert events(tmp_path)["loss/train_steps"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


@pytest.mark.slow
@needs_tensorboard
def test_tensorboard_shows_a_running_and_a_killed_run(tmp_path):
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
def test_a_full_disk_is_reported_once_and_neither_raises_nor_hangs(tmp_path, capfd):
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
    assert len(said) == 1 and "continues without it" in said[0]
    assert capfd.readouterr().err == ""  # no traceback within the progress bar
    assert events(tmp_path)["loss/train_steps"] == [(1, 1.0)]  # half a record at the end is no harm


@needs_tensorboard
def test_a_full_disk_at_the_last_record_is_reported(tmp_path):
    said = []
    board = TensorBoard(tmp_path, warn=said.append)
    with full_disk(1):
        board.log(window(1, loss=1.0))
        board.close()
    board.log(window(2, loss=1.0))  # after close it does nothing
    board.close()
    assert len(said) <= 1


@needs_tensorboard
@pytest.mark.parametrize("where", ["a file", "a full disk"])
def test_a_tensorboard_that_cannot_start_is_reported(tmp_path, where):
    said = []
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" / "tb" if where == "a file" else tmp_path / "tb"
    with full_disk(1) if where == "a full disk" else contextlib.nullcontext():
        board = TensorBoard(folder, warn=said.append)
        board.log(window(1, loss=1.0))
        board.close()
    assert len(said) == 1 and str(folder) in said[0] and "\n" not in said[0]
