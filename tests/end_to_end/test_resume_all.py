"""Everything that has a state, switched on at once: a run that is stopped or killed, or loses its
workers, ends with the bytes of the undisturbed run."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE, wait_until
from PIL import Image
from quick_runs import QUICK_PROCESSES, handlers_put_back, quick
from soak import of_the_soak
from test_signals import finish, start

import resnet50_test
import vit_test

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
CPU = ["--device", "cpu", "--threads", "1"]
MODELS = {
    resnet50_test: ["--depth", "18", "--width", "4"],
    vit_test: ["--layers", "2", "--dim", "16", "--heads", "2", "--ffn", "32"],
}
EVERYTHING = [
    "--dataset", "imagefolder", "--image_size", "16", "--val_fraction", "0.2", "--workers", "2",
    "--freeze_backbone", "--unfreeze_epoch", "1", "--epochs", "5", "-b", "8",
    "--accumulation_steps", "2", "--optimizer", "adamw", "--lr", "1", "--warmup_steps", "5",
    "--sched", "plateau", "--plateau_patience", "0", "--gamma", "0.5", "--clip", "1",
    "--label_smoothing", "0.1", "--ema_decay", "0.9", "--early_stop_patience", "5",
    "--random_erasing", "0.5", "--cutout", "4", "--drop_path", "0.3",
    "--log_every", "2", "--save_every", "3", "--checkpoint_hist", "2", *CPU,
]  # fmt: skip
WEIGHTS = ("model.safetensors", "average.safetensors", "optimizer.safetensors")
OF_THE_CLOCK = {
    "samples_per_second", "time_share", "peak_memory_bytes", "seconds_total", "seconds_training",
    "seconds_first_step", "gpu_seconds", "metrics_bytes",
}  # fmt: skip


# ---- what must be equal -----------------------------------------------------------------------


def without_clock(value):
    """JSON without what depends on the clock, at any depth."""
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in OF_THE_CLOCK}
    return value


def result(folder: Path) -> dict:
    """The results of the run, without times: each part has a name, which a failure shows."""
    summary = json.loads((folder / "summary.json").read_text())
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = {
        "summary": without_clock(summary),
        "metrics": [without_clock(json.loads(line)) for line in lines],
        "last step": newest.name,
        "state": without_clock(json.loads((newest / "state.json").read_text())),
    }
    for place in (newest, folder / summary["best_checkpoint"]):
        found |= {f"{place.name}/{name}": (place / name).read_bytes() for name in WEIGHTS}
    return found


def assert_same(folder: Path, whole: Path) -> None:
    ours, expected = result(folder), result(whole)
    assert ours.keys() == expected.keys()
    for part, value in expected.items():
        assert ours[part] == value, part


# ---- what must be gone ------------------------------------------------------------------------


def processes(session: int) -> dict[int, str]:
    """{id: command line} of the living processes of a session; each run has its own session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(number) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended since
            continue
    return found


def workers(process: subprocess.Popen) -> list[int]:
    return [pid for pid, command in processes(process.pid).items() if "spawn_main" in command]


def abandoned() -> set[str]:
    """Blocks of shared memory that no living process has mapped. (Other programs may use some at
    the same time.)"""
    names = {path.name for path in SHM.glob("psm_*")}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:
            continue
        names -= {name for name in names if name in text}
    return names


@pytest.fixture
def launch():
    """Starts a run by start(...) or the like, and asserts that it leaves no process and no shared
    memory, however it ends."""
    before, runs = abandoned() if SHM.is_dir() else set(), []

    def run(*arguments, begin=start) -> subprocess.Popen:
        runs.append(begin(*arguments))
        return runs[-1]

    yield run
    for process in runs:
        if process.poll() is None:  # the test has failed
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        wait_until(lambda p=process: not processes(p.pid), "a process is left")
    if SHM.is_dir():
        wait_until(lambda: abandoned() <= before, "shared memory is left")


# ---- the runs ---------------------------------------------------------------------------------


def arguments(entry, root: Path, output: str) -> list:
    """The arguments that start the run `output` of an entry below `root`, or resume it."""
    folder = root / output
    if (folder / "config.yaml").exists():
        return ["--resume", folder]
    data = ["--data_dir", root / "pictures", "--cache_dir", root / "cache"]
    start = ["--pretrained", root / "small", "--output", folder]
    return [*EVERYTHING, *MODELS[entry], *data, *start]


@pytest.fixture(scope="module")
def resnet_place(tmp_path_factory) -> Path:
    """A folder with pictures, a run to start from, and the undisturbed run `whole`."""
    root = prepare(resnet50_test, tmp_path_factory.mktemp("resnet"))
    # Certain on every CPU: when all layers begin to train, by a rate that is far too high and on
    # pictures without a meaning, the validation loss rises manyfold.
    lines = map(json.loads, (root / "whole" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in lines if record["split"] == "val"]
    assert losses[1] > 2 * losses[0]
    assert "the learning rate falls" in (root / "whole" / "log.txt").read_text()
    return root


@pytest.fixture(scope="module")
def vit_place(tmp_path_factory) -> Path:
    """The same of a ViT."""
    return prepare(vit_test, tmp_path_factory.mktemp("vit"))


def prepare(entry, root: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 10)):
        for name in ("ant", "bee", "cat"):
            folder = root / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    small = ["--dataset", "shapes", "--subset", "40", "--max_steps", "2", "--eval_every", "0"]
    with pytest.MonkeyPatch.context() as patch, handlers_put_back():
        quick(patch)
        small += [*MODELS[entry], *CPU, "--output", str(root / "small")]
        assert entry.main(small) == 0
        assert entry.main([str(word) for word in arguments(entry, root, "whole")]) == 0
    out = (root / "whole" / "log.txt").read_text()
    assert "head of 10 classes replaced by one of 3" in out
    assert "from here on all layers train" in out
    return root


def is_writing(folder: Path) -> bool:
    return any(folder.glob("checkpoints/.writing-*"))


def poll_until(condition, process) -> None:
    """Waits for the condition or the end of the process; checks thousands of times a second."""
    end = time.monotonic() + PATIENCE
    while process.poll() is None and not condition():
        assert time.monotonic() < end
        time.sleep(0.0002)


# The entry script, disturbing itself: no other process could be sure to meet a certain step.
# Arguments: the entry; what happens; in which call of the objective or of fsync; the entry's own.
DISTURBED = """
import importlib, multiprocessing, os, random, signal, sys
import pytest
from quick_runs import raise_in_step
from utils.training.objective import Classification

def kill_in_write(number):
    fsync, calls = os.fsync, []
    def call(file):
        number_of_it = getattr(file, "fileno", lambda: file)()
        if ".writing-step" in os.readlink(f"/proc/self/fd/{number_of_it}"):
            calls.append(file)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)
    os.fsync = call

def kill_worker(number):
    forward, calls = Classification.__call__, []
    def call(self, *arguments):
        calls.append(arguments)
        if len(calls) == number:
            random.choice(multiprocessing.active_children()).kill()
        return forward(self, *arguments)
    Classification.__call__ = call

if __name__ == "__main__":
    entry, kind, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "SIGTERM":
        raise_in_step(pytest.MonkeyPatch(), number, signal.SIGTERM)
    else:
        {"write": kill_in_write, "worker": kill_worker}[kind](number)
    sys.exit(importlib.import_module(entry).main(sys.argv[4:]))
"""


def start_disturbed(*arguments) -> subprocess.Popen:
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (ROOT, here.parent, here, QUICK_PROCESSES)))
    return subprocess.Popen(
        [sys.executable, "-c", DISTURBED, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    "entry",
    [resnet50_test, pytest.param(vit_test, marks=of_the_soak)],
    ids=lambda entry: entry.__name__,
)
def test_a_run_that_is_stopped_killed_and_loses_a_worker_ends_the_same(launch, entry, request):
    """SIGTERM in a random step, SIGKILL while a checkpoint is being written, a worker killed: each
    time the run is resumed or goes on, and it ends as if nothing had happened."""
    fixture = {resnet50_test: "resnet_place", vit_test: "vit_place"}[entry]
    place = request.getfixturevalue(fixture)
    rng, folder = random.Random(), place / "disturbed"

    def disturbed(kind: str, number: int):
        words = arguments(entry, place, "disturbed")
        return finish(launch(entry.__name__, kind, number, *words, begin=start_disturbed))

    step = rng.randint(3, 20)
    code, _, err = disturbed("SIGTERM", 2 * step)  # of two micro-batches each
    assert code == 143 and "saved; resume with --resume" in err, err
    assert (folder / "checkpoints" / f"step-{step:08}").is_dir()
    assert disturbed("write", rng.randint(1, 12))[0] == -signal.SIGKILL
    assert is_writing(folder)
    code, out, err = disturbed("worker", rng.randint(2, 20))
    assert code == 0, err
    assert "a worker process died (SIGKILL) and was replaced" in out
    assert_same(folder, place / "whole")


def disturb(process, folder: Path, kind: str, rng: random.Random) -> None:
    """Sends a signal at a random moment, or kills the workers of the run."""
    if kind == "SIGKILL while writing":
        for _ in range(rng.randint(1, 4)):  # lets all but the last pass
            poll_until(lambda: not is_writing(folder), process)
            poll_until(lambda: is_writing(folder), process)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
    elif kind == "workers":
        poll_until(lambda: workers(process), process)
        for pid in workers(process)[: rng.randint(1, 2)]:
            time.sleep(rng.uniform(0, 1.0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(1.0, 6.0))
        process.send_signal(getattr(signal, kind))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=of_the_soak)])
@pytest.mark.parametrize(
    "kind",
    [pytest.param("SIGTERM", marks=of_the_soak), "SIGKILL", "SIGKILL while writing", "workers"],
)
def test_a_run_disturbed_at_random_moments_ends_the_same(launch, resnet_place, kind, seed):
    """Disturbed up to five times, then left alone."""
    rng, output, place = random.Random(f"{kind} {seed}"), f"{kind} {seed}", resnet_place
    expected = {"SIGTERM": {143, -15}, "workers": {0}}.get(kind, {-9}) | {0}
    for attempt in range(6):
        process = launch(*arguments(resnet50_test, place, output))
        if attempt < 5:
            disturb(process, place / output, kind, rng)
        code, _, err = finish(process)
        assert code in expected, err
        if code == 0:
            break
    assert code == 0
    assert_same(place / output, place / "whole")
