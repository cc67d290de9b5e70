#!/usr/bin/env python3
"""Accuracy after 1, 3, 10 and 30 minutes on this machine: this toolkit and others, from nothing.

    python -m benchmarks.minutes --data cifar10 --data_dir FOLDER --output minutes.jsonl \\
        --environments ENVIRONMENTS --timm_script TRAIN_PY
    python -m benchmarks.minutes --data ag_news --data_dir FOLDER --output minutes.jsonl \\
        --environments ENVIRONMENTS
    python -m benchmarks.minutes --table minutes.jsonl

FOLDER has train/CLASS/*.jpg and test/CLASS/*.jpg, or train.csv and test.csv (class, texts).
TRAIN_PY is train.py of timm's repository. The contenders and their settings, one each, are in
benchmarks/minutes_contenders.py; what they need is installed into ENVIRONMENTS.

The time is that of the whole process, from its start to its end, with the test. A contender without
a time limit of its own is timed first, outside the clock: that tells how many epochs take 95 % of
the time, or how many samples, where not even one epoch fits. A run that ends too late is repeated
with less, and one that ends so early that a tenth more would fit, with more.

Each result is a line of --output. Started again with the same flags, it goes on where it was. A
seed takes 45 minutes for each contender, in which no other program should compute.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine
from benchmarks.minutes_contenders import CONTENDERS, Contender, Job
from benchmarks.studies import exit_code, last_line, markdown, read_records, writing
from utils.data.splits import stratified_subset
from utils.errors import UserError
from utils.files import reason

FILLS = 0.95  # of the time, by plan
# The first timing run has this part of the samples, or seconds. Further ones have GROWTH times as
# many samples, until one takes SECONDS_MORE: starting takes now more, now less.
FIRST, GROWTH, SECONDS_MORE = {"samples": 0.02, "seconds": 15}, 4, 15
WORTH = 1.1  # times as many samples as a run had, to run again with more
LEAST = {"samples": 300, "seconds": 5}  # to train on: some batches
FOUND = ("accuracy", "seconds", "amount", "epochs", "samples", "command")


class Failed(Exception):
    """Why a contender gave no result, on one line."""


# ---- data and environments --------------------------------------------------------------------


class Samples:
    """The user's data, which no contender may write into: each is given links to it."""

    def __init__(self, data: str, folder: Path):
        self.data, self.folder = data, folder
        try:
            if data == "ag_news":
                with open(folder / "train.csv", newline="", encoding="utf-8") as file:
                    self.items = [row for row in csv.reader(file) if row]
                self.labels = [row[0] for row in self.items]
            else:
                self.items = sorted((folder / "train").glob("*/*"))
                self.labels = [path.parent.name for path in self.items]
        except OSError as error:
            raise UserError(f"--data_dir: {folder / 'train.csv'}: {reason(error)}") from None
        if not self.items:
            raise UserError(f"--data_dir: {folder / 'train'} has no pictures in folders of classes")

    def part(self, target: Path, number: int, seed: int) -> None:
        """Makes a folder with `number` training samples and the whole test set."""
        chosen = [self.items[row] for row in stratified_subset(self.labels, number, seed)]
        target.mkdir()
        if self.data == "ag_news":
            with open(target / "train.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(chosen)
            (target / "test.csv").symlink_to((self.folder / "test.csv").resolve())
            return
        for path in [*chosen, *(self.folder / "test").glob("*/*")]:
            link = target / path.relative_to(self.folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())


def environment(name: str, contender: Contender, folder: Path | None) -> Path:
    """The folder of the contender's programs; made if it is not there."""
    if not contender.packages:
        return Path(sys.executable).parent
    if folder is None:
        raise UserError(f"--environments: name a folder for the packages of {name}")
    home = folder.resolve() / name
    done, wanted = home / "packages.txt", "\n".join(contender.packages)
    if not (done.exists() and done.read_text() == wanted):
        print(f"{name}: installing {' '.join(contender.packages)} into {home}", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        python = home / "bin/python"
        if contender.shares:  # the large packages, where the pins of its own allow them
            where = "import sysconfig; print(sysconfig.get_path('purelib'))"
            own = subprocess.check_output([python, "-c", where], text=True).strip()
            here = subprocess.check_output([sys.executable, "-c", where], text=True)
            Path(own, "running.pth").write_text(here)
        command = [python, "-m", "pip", "install", "--quiet", *contender.packages]
        found = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if found.returncode:
            raise Failed(f"pip: {last_line(found.stderr)}")
        done.write_text(wanted)
    return home / "bin"


def versions(programs: Path, contender: Contender) -> dict[str, str]:
    names = {"torch", *(package.split("=")[0].split("[")[0] for package in contender.packages)}
    command = [programs / "python", "-m", "pip", "list", "--format", "json"]
    found = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
    return {package["name"]: package["version"] for package in found if package["name"] in names}


# ---- one run ----------------------------------------------------------------------------------


def timed(command: list[str], folder: Path, most: float | None) -> float:
    """Seconds that a process took in this folder; `most` if it was ended then. Raises Failed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    environ |= {"YOLO_CONFIG_DIR": str(folder / "yolo"), "YOLO_OFFLINE": "true"}
    log, started = folder / "log.txt", time.perf_counter()
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(most)
        except subprocess.TimeoutExpired:
            return most
        finally:
            seconds = time.perf_counter() - started
            with contextlib.suppress(ProcessLookupError):  # loaders that outlive their process
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise Failed(last_line(log.read_text(errors="replace")))
    return seconds


@dataclass(frozen=True)
class Runner:
    """Runs a contender on the data with an amount of training: samples or seconds."""

    contender: Contender
    samples: Samples
    programs: Path
    timm_script: Path | None

    @property
    def most(self) -> float:
        """What more would be of no use."""
        is_limited = self.contender.unit == "samples"
        return self.contender.most_epochs * len(self.samples.items) if is_limited else math.inf

    def divided(self, amount: float) -> tuple[int, int]:
        """(epochs, samples in each)."""
        number = len(self.samples.items)
        if self.contender.unit != "samples":
            return 1, number
        return max(1, int(amount // number)), min(number, int(amount))

    def run(self, amount: float, seed: int, most: float | None = None) -> dict:
        """Ends the process after `most` seconds, without an accuracy. Raises Failed."""
        epochs, number = self.divided(amount)
        if self.contender.unit == "samples":
            amount = epochs * number
        with tempfile.TemporaryDirectory(prefix="minutes-") as folder:
            work = Path(folder).resolve()
            self.samples.part(work / "data", number, seed)
            job = Job(
                self.samples.data, work / "data", epochs, amount, seed, work / "run",
                self.programs, self.timm_script,
            )  # fmt: skip
            command = [str(word) for word in self.contender.command(job)]
            seconds, accuracy = timed(command, work, most), None
            if seconds != most:
                try:
                    accuracy = self.contender.accuracy(work / "run")
                except (OSError, LookupError, ValueError) as error:
                    raise Failed(f"no accuracy: {error}") from None
        return {
            "accuracy": accuracy, "seconds": round(seconds, 1), "amount": amount,
            "epochs": epochs, "samples": number, "command": " ".join(command),
        }  # fmt: skip


def timing(runner: Runner) -> list[list[float]]:
    """Two points [amount, seconds]."""
    if runner.contender.unit == "seconds":
        found = runner.run(FIRST["seconds"], seed=0)
        return [[0, found["seconds"] - found["amount"]], [found["amount"], found["seconds"]]]
    points, amount = [], FIRST["samples"] * len(runner.samples.items)
    while True:
        amount = min(max(amount, LEAST["samples"]), runner.most)
        found = runner.run(amount, seed=0)
        points.append([found["amount"], found["seconds"]])
        if found["seconds"] >= points[0][1] + SECONDS_MORE or amount == runner.most:
            return [points[0], points[-1]]
        amount *= GROWTH


def fitting(points: list[list[float]], seconds: float) -> float:
    """The amount that takes these seconds, on the line through the points."""
    (least, start), (large, end) = points
    each = (end - start) / (large - least) if large > least else 0
    return least + (seconds - start) / each if each > 0 else math.inf


def planned(runner: Runner, limit: float, seed: int, points, lines: list[dict]) -> dict:
    """The result of a contender that is told how much to train. Raises Failed."""
    unit, seconds = runner.contender.unit, limit * FILLS
    amount = min(fitting(points, seconds), seconds if unit == "seconds" else runner.most)
    fits, was_late = dict.fromkeys(FOUND), False
    while amount >= LEAST[unit]:
        for line in lines if amount == runner.most else ():
            if line["amount"] == amount and line["seed"] == seed:  # within a shorter time
                return {key: line[key] for key in FOUND}
        found = runner.run(amount, seed, 1.5 * limit)
        points = [points[0], [found["amount"], found["seconds"]]]
        if found["seconds"] > limit:
            if fits["seconds"] is not None:
                break
            was_late, change = True, "less"
            amount = min(fitting(points, seconds), amount / 1.1)
        else:
            fits, change = found, "more"
            amount = min(fitting(points, seconds), runner.most)
            gains = math.prod(runner.divided(amount)) >= WORTH * found["amount"]
            if was_late or unit == "seconds" or not gains:
                break
        print(f"  took {found['seconds']:.0f} s, so once more, with {change}", flush=True)
    return fits


# ---- all runs ---------------------------------------------------------------------------------


def study(options) -> None:
    samples = Samples(options.data, options.data_dir)
    names = options.contenders or [n for n, c in CONTENDERS.items() if options.data in c.data]
    for name in names:
        if options.data not in CONTENDERS[name].data:
            raise UserError(f"--contenders: {name} is not for {options.data}")
    if "timm" in names and options.timm_script is None:
        raise UserError(
            "--timm_script: name train.py of https://github.com/huggingface/pytorch-image-models, "
            "which the package timm does not contain, or leave timm out by --contenders"
        )
    runners, failed = {}, set()
    for seed in range(1, options.seeds + 1):
        for minutes in options.minutes:
            for name in (name for name in names if name not in failed):
                try:
                    if name not in runners:
                        programs = environment(name, CONTENDERS[name], options.environments)
                        script = options.timm_script and options.timm_script.resolve()
                        runners[name] = Runner(CONTENDERS[name], samples, programs, script)
                    measure(name, runners[name], minutes, seed, options.output)
                except Failed as error:
                    failed.add(name)
                    print(f"{name}: left out: {error}", flush=True)
    print(table(read_records(options.output)))
    if failed:
        raise UserError(f"not measured to the end: {', '.join(sorted(failed))}; see above")


def measure(name: str, runner: Runner, minutes: float, seed: int, output: Path) -> None:
    """Adds a line to the results, unless it is there. Raises Failed."""
    who = {"contender": name, "data": runner.samples.data}
    lines = [line for line in read_records(output) if who.items() <= line.items()]
    done = [line for line in lines if "minutes" in line]
    if any((line["minutes"], line["seed"]) == (minutes, seed) for line in done):
        return
    print(f"{name}, {minutes:g} minutes, seed {seed}", flush=True)
    if runner.contender.unit == "budget":
        found = runner.run(60 * minutes, seed)
    else:
        points = next((line["timing"] for line in lines if "timing" in line), None)
        if points is None:
            points = timing(runner)
            add(output, who | {"timing": points, "unit": runner.contender.unit})
        found = planned(runner, 60 * minutes, seed, points, done)
    print(f"  accuracy {found['accuracy']} after {found['seconds']} s", flush=True)
    state = {"versions": versions(runner.programs, runner.contender), "machine": machine()}
    add(output, who | {"minutes": minutes, "seed": seed} | found | state)


def add(output: Path, line: dict) -> None:
    with writing(output), open(output, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def table(lines: list[dict]) -> str:
    """Markdown: the mean accuracy of the seeds, their range, and the longest process."""
    lines, parts = [line for line in lines if "minutes" in line], []
    for data in dict.fromkeys(line["data"] for line in lines):
        of_data = [line for line in lines if line["data"] == data]
        columns = sorted({line["minutes"] for line in of_data})
        rows = []
        for name in (name for name in CONTENDERS if name in {x["contender"] for x in of_data}):
            own = [line for line in of_data if line["contender"] == name]
            cells = [cell([x for x in own if x["minutes"] == minutes]) for minutes in columns]
            used = ", ".join(f"{key} {value}" for key, value in own[-1]["versions"].items())
            rows.append([name, *cells, used])
        head = [data, *(f"{minutes:g} min" for minutes in columns), "versions"]
        machines = dict.fromkeys(in_words(line["machine"]) for line in of_data)
        parts.append(f"{'; '.join(machines)}\n\n{markdown(head, rows)}")
    return "\n".join(parts)


def cell(several: list[dict]) -> str:
    found = [line["accuracy"] for line in several if line["accuracy"] is not None]
    if not found:
        return "does not fit" if several else ""
    text, seconds = f"{statistics.mean(found):.1f}", max(line["seconds"] or 0 for line in several)
    if len(found) > 1:
        text += f" ({min(found):.1f} to {max(found):.1f})"
    return f"{text}, {seconds:.0f} s"


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        "benchmarks.minutes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = flags.add_argument
    add("--data", choices=("cifar10", "ag_news"), default="cifar10")
    add("--data_dir", type=Path, metavar="FOLDER")
    add("--output", type=Path, metavar="FILE.jsonl", help="the results are added to it")
    add("--environments", type=Path, metavar="FOLDER", help="where others are installed")
    add("--timm_script", type=Path, metavar="FILE", help="train.py of timm's repository")
    add("--contenders", nargs="+", choices=CONTENDERS, help="default: all for the data")
    add("--minutes", type=float, nargs="+", default=[1, 3, 10, 30], help="default: 1 3 10 30")
    add("--seeds", type=int, default=3, help="default: 3")
    add("--table", type=Path, metavar="FILE.jsonl", help="only print the table of these results")
    options = flags.parse_args(argv)

    def act() -> None:
        if options.table is not None:
            print(table(read_records(options.table)))
        elif options.data_dir is None or options.output is None:
            raise UserError("name --data_dir and --output, or --table")
        else:
            study(options)

    return exit_code(act, "the result that is missing")


if __name__ == "__main__":
    sys.exit(main())
