"""Runs of entry_for_faults.py under the real launcher, and what they leave behind."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE
from quick_runs import QUICK_PROCESSES

from utils.data.batch import ORDER_STREAM, random_generator

ROOT = Path(__file__).resolve().parents[2]
ENTRY = Path(__file__).with_name("entry_for_faults.py")
TIMEOUT = 3 * PATIENCE  # seconds, of one launch with many restarts
SAMPLES, BATCH, INTERVAL = 200, 8, 3  # pictures, of a process, steps between checkpoints
IMAGES = [
    "--dataset", "shapes", "--subset", SAMPLES, "--depth", 18, "--width", 2, "--device", "cpu",
    "--batch_size", BATCH, "--eval_every", 0, "--log_every", 1, "--save_every", INTERVAL,
]  # fmt: skip
TEXTS = [
    "--dataset", "headlines", "--subset", SAMPLES, "--layers", 1, "--dim", 16, "--heads", 2,
    "--ffn", 16, "--device", "cpu", "--batch_size", BATCH, "--eval_every", 0, "--log_every", 1,
    "--save_every", INTERVAL,
]  # fmt: skip
# The last call of each phase at which a fault may happen: a little beyond the first checkpoint.
CALLS = {"joining": 2, "loading": 7, "forward": 7, "backward": 7, "reduction": 14, "update": 6,
         "writing": 16, "renaming": 3}  # fmt: skip
# With local steps, whose processes each write their workers' part of a checkpoint.
CALLS_OF_LOCAL_STEPS = {key: count for key, count in CALLS.items() if key != "reduction"}
CALLS_OF_LOCAL_STEPS["averaging"] = 5


class Runs:
    """Starts runs in `folder`; each has a folder and a file of notes by its name."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []

    def start(self, *arguments, name: str, prefix=(), faults=(), **environ) -> subprocess.Popen:
        """Starts run_distributed.sh, with two processes unless NPROC says otherwise."""
        return self._start([*prefix, "bash", ROOT / "run_distributed.sh", ENTRY, *arguments],
                           name, faults, {"NPROC": "2"} | environ)  # fmt: skip

    def start_alone(self, *arguments, name: str, **environ) -> subprocess.Popen:
        """Starts one process without the launcher."""
        path = os.pathsep.join([str(ROOT), QUICK_PROCESSES])
        return self._start(
            [sys.executable, ENTRY, *arguments], name, [], {"PYTHONPATH": path} | environ
        )

    def _start(self, command, name, faults, environ) -> subprocess.Popen:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        known = {key: value for key, value in os.environ.items() if "SLURM" not in key}
        mine = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        mine |= {"NOTES": str(self._notes(name)), "FAULTS": json.dumps(list(faults))}
        run = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=known | mine | {"TMPDIR": str(temporary)} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(run)
        return run

    def run(self, *arguments, **options) -> tuple[int, str]:
        """Waits for a launch to end: (exit code, stderr)."""
        return end(self.start(*arguments, **options))

    def train(self, flags, *, name: str, **options) -> tuple[int, str]:
        """Trains a new run in the folder `name`: (exit code, stderr)."""
        return self.run(*flags, "--output", name, name=name, **options)

    def _notes(self, name: str) -> Path:
        return self.folder / f"{name}.notes"

    def notes(self, name: str, *keys: str) -> list[dict]:
        """The notes of the processes that have all of these keys, in order of time."""
        path = self._notes(name)
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if all(key in note for key in keys)]

    def tensors(self, name: str) -> dict[str, str]:
        """Checksums of the tensor files of the newest checkpoint: weights, optimizer, ..."""
        newest = max((self.folder / name / "checkpoints").glob("step-????????"))
        files = newest.glob("*.safetensors")
        return {
            f"{newest.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files
        }

    def losses(self, name: str) -> list[tuple[int, float]]:
        """(step, loss) of each step's line in metrics.jsonl, in order."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        records = list(map(json.loads, lines))
        return [(r["step"], r["loss"]) for r in records if r.get("average_over") == "steps"]

    def summary(self, name: str) -> dict:
        return json.loads((self.folder / name / "summary.json").read_text())

    def check_equal(self, name: str, reference: str) -> None:
        """Asserts equal weights, optimizer and losses, to the bit, and one line for each step."""
        losses = self.losses(name)
        assert [step for step, _ in losses] == list(range(1, len(losses) + 1))
        assert losses == self.losses(reference)
        assert self.tensors(name) == self.tensors(reference)

    def order(self, name: str) -> list[list[int]]:
        """The samples of each step, of all ranks and sorted, when it was last trained."""
        sizes: dict[int, int] = {}  # number of processes that trained a step last
        done: dict[tuple[int, int], tuple[str, list]] = {}  # (step, rank) -> (life, samples)
        for note in self.notes(name, "samples"):
            key = note["step"], note["rank"]
            life, samples = done.get(key, ("", []))
            samples = samples if life == note["life"] else []
            done[key] = note["life"], samples + note["samples"]
            sizes[note["step"]] = note["size"]
        return [
            sorted(sample for rank in range(sizes[step]) for sample in done[step, rank][1])
            for step in range(len(sizes))
        ]

    def check_redone(self, name: str) -> int:
        """Asserts that each start went on from the newest checkpoint: at most INTERVAL steps were
        repeated, and those that were trained while a checkpoint was being written. Returns the
        largest number of repeated steps."""
        done, saved, begun, life, worst = 0, 0, 0, None, 0
        for note in self.notes(name):
            if "step" in note:
                if note["life"] != life:
                    life, again = note["life"], done - note["step"]
                    assert note["step"] >= saved
                    assert again <= (INTERVAL + 1 if begun <= saved else 2 * INTERVAL)
                    worst, done = max(worst, again), note["step"]
                done = max(done, note["step"])
            saved, begun = note.get("saved", saved), note.get("begun", begun)
        return worst

    def left(self, name: str) -> list[int]:
        """Process ids of those that are still alive."""
        return [note["pid"] for note in self.notes(name, "pid") if alive(note["pid"])]

    def close(self) -> None:
        for run in self.started:
            if run.poll() is None:
                run.kill()
            run.communicate()
        for path in self.folder.glob("*.notes"):
            for pid in self.left(path.stem):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def end(run: subprocess.Popen) -> tuple[int, str]:
    _, err = run.communicate(timeout=TIMEOUT)
    return run.returncode, err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def random_kills(seed: int, starts: int, size: int, local: bool = False) -> list[dict]:
    """A kill for each of `starts` starts of `size` processes, at random moments. Those in disk
    operations are of the first rank, which alone renames."""
    rng, kills = random.Random(seed), []
    calls = CALLS_OF_LOCAL_STEPS if local else CALLS
    for start in range(starts):
        phase = rng.choice(list(calls))
        rank = 0 if phase in ("writing", "renaming") else rng.randrange(size)
        kills.append(fault(phase, rng.randint(1, calls[phase]), rank, start))
    return kills


def fault(phase: str, count: int, rank: int = 1, start: int = 0, do: str = "kill") -> dict:
    return {"start": start, "rank": rank, "phase": phase, "count": count, "do": do}


def epoch_order(epoch: int, step_size: int) -> list[list[int]]:
    """The samples of each step of an epoch of pictures, sorted."""
    order = random_generator(0, ORDER_STREAM, epoch).permutation(SAMPLES)
    return [sorted(order[i : i + step_size].tolist()) for i in range(0, SAMPLES, step_size)]
