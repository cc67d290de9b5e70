"""A run of the entry for a trial, in a process and a folder of its own; resumed after a stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError
from utils.files import replace_file
from utils.launch.launchers import without_launch
from utils.machine.cores import usable_cores
from utils.measures.table import MEASURES, Measure
from utils.place import PACKAGE, python_path
from utils.reporting.metrics import read_metrics
from utils.settings.config import Config

from .child import PARENT
from .files import AGAIN, as_user_error
from .recipe import to_yaml

# Errors that the settings of a trial cause; any other error with exit code 2 would occur in every
# trial, and the user has to fix it.
OF_A_TRIAL: tuple = ("not finite", "out of memory", "no loss scale keeps", "has no effect")
# --min_lr or --warmup_lr, with --lr_base_size: the run alone knows the peak learning rate.
OF_A_TRIAL += ("is above this learning rate",)
# Exit codes of a run that was told to stop, before its first import and after.
STOPPED = [
    code
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for code in (-number, 128 + number)
]
POLL_SECONDS = 0.1
# Most trials at once without a GPU, unless --jobs says otherwise.
MOST_JOBS = 4
# Devices of NVIDIA's driver, Windows and AMD's driver.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Settings that a resumed run is given again, as the files may have moved.
OF_THE_PLACE: tuple = ("data_dir", "cache_dir", "train_file", "test_file", "val_file", "device")
OF_THE_PLACE += ("labels", "workers")


class Interrupted(Exception):
    """The search was told to stop; the run is saved, and is resumed the next time."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run. If it failed, only `failure` is set, to the reason in words.

    Attributes:
        score: `Measure.score` on the validation split, in per cent.
        val_samples, trained: samples of that split; samples trained on, counted anew in each epoch.
        seconds: of all starts of the run.
    """

    score: float = float("nan")
    val_samples: int = 0
    trained: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    failure: str | None = None


class Runner:
    """Args:
    threads: CPU threads of a run.
    devices: CUDA_VISIBLE_DEVICES of each slot; empty: unchanged.
    time_is_up: () -> whether runs are to be stopped.
    measure: what trials are judged by.
    """

    def __init__(
        self,
        entry: Path,
        threads: int,
        devices: list[str],
        time_is_up=lambda: False,
        measure: Measure = MEASURES["accuracy"],
    ):
        self.entry, self.threads, self.devices = entry, threads, devices
        self.measure = measure
        self.time_is_up = time_is_up
        self.stopping = threading.Event()

    def run(self, folder: Path, settings: dict, slot: int, lock: int) -> Outcome:
        """Trains in `folder`, or reads the result that it holds.

        Args:
            slot: which of the jobs this is.
            lock: file descriptor of a lock that the process holds, too.

        Raises:
            Interrupted: the search stops, or its time is up.
            UserError: an error that every trial would meet.
        """
        failed = folder / "failure.txt"
        with as_user_error(folder, folder, AGAIN):
            if failed.exists():
                return Outcome(failure=failed.read_text(encoding="utf-8").strip())
            if not self._is_finished(folder):
                failure = self._train(folder, settings, slot, lock)
                if failure is not None:
                    # A run that fails before its first step removes its folder.
                    folder.mkdir(parents=True, exist_ok=True)
                    replace_file(failed, failure.encode())
                    return Outcome(failure=failure)
            outcome = self._read(folder)
            # Settings and figures stay; nobody needs the weights of a trial.
            for name in ("checkpoints", "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
            return outcome

    def _is_finished(self, folder: Path) -> bool:
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return summary.get("status") in ("finished", "stopped_early")

    def _train(self, folder: Path, settings: dict, slot: int, lock: int) -> str | None:
        """Trains until the run is finished; returns why it failed, in a line, or None."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe = folder.with_name(f"{folder.name}.yaml")
        replace_file(recipe, to_yaml(settings, []).encode("utf-8", "surrogateescape"))
        if (folder / "config.yaml").exists():
            words = ["--resume", str(folder)]
            for name in OF_THE_PLACE:
                if settings.get(name) is not None:
                    words += [f"--{name}", str(settings[name])]
        else:
            words = ["--config", str(recipe), "--output", str(folder)]
        code, said = self._start([*words, "--threads", str(self.threads)], slot, lock)
        if code == 0:
            if self._is_finished(folder):
                return None
            raise UserError(f"{folder}: the run has left no summary.json; is the disk full?")
        if code in STOPPED:
            raise Interrupted
        line = (said.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
        if code == 2 and not any(words in line for words in OF_A_TRIAL):
            raise UserError(f"{line} ({folder})")
        if code < 0:
            return f"killed by signal {-code}, perhaps for lack of memory"
        return " ".join(line.split()) if code == 2 else f"exit code {code}: {line}"

    def _start(self, words: list[str], slot: int, lock: int) -> tuple[int, str]:
        """(exit code, stderr) of the entry with these flags."""
        environment = without_launch(os.environ) | python_path()
        environment |= {"OMP_NUM_THREADS": str(self.threads), PARENT: str(os.getpid())}
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        if self.stopping.is_set() or self.time_is_up():
            raise Interrupted
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{PACKAGE}tuning.child", str(self.entry), *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C ends the search, which then ends its runs
            env=environment, pass_fds=(lock,),
        )  # fmt: skip
        told = False
        while True:
            try:
                said = process.communicate(timeout=POLL_SECONDS)[1]
            except subprocess.TimeoutExpired:
                if not told and (self.stopping.is_set() or self.time_is_up()):
                    told = True
                    process.terminate()  # it finishes its step and saves
                continue
            if told and process.returncode:
                raise Interrupted
            return process.returncode, said

    def _read(self, folder: Path) -> Outcome:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        val = [
            record
            for record in read_metrics(folder / "metrics.jsonl")
            if record.get("split") == "val" and not record.get("model")
        ]
        value = val[-1].get(self.measure.name) if val else None
        if value is None:
            return Outcome(failure=f"it has no {self.measure.title} on the validation split")
        return Outcome(
            score=self.measure.score(value),
            val_samples=val[-1]["samples"],
            trained=summary["train_samples"] * summary["epochs"],
            steps=summary["steps"],
            seconds=summary["seconds_total"],
        )


def machine(jobs: int | None, base: Config) -> tuple[int, int, list[str]]:
    """How a search divides the machine: (trials at once, CPU threads of each, CUDA_VISIBLE_DEVICES
    of each GPU or [])."""
    cores = usable_cores()
    devices = []
    # PyTorch takes seconds to import, so only if there may be a GPU.
    if base.device != "cpu" and any(map(os.path.exists, DRIVERS)):
        import torch

        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = [str(n) for n in range(count)] if not visible else visible.split(",")[:count]
    jobs = jobs or (len(devices) if devices else min(cores, MOST_JOBS))
    threads = base.threads or max(1, cores // jobs)
    return jobs, threads, devices
