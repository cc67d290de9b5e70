#!/usr/bin/env python3
"""No mixing, mixup, CutMix and meta-mixup compared at equal epochs.

    python -m benchmarks.mixup_study --data_dir FOLDER --output runs/mixup_study --jobs 2
    python -m benchmarks.mixup_study --data_dir FOLDER --output runs/full --device cuda \\
        --train_samples 45000 --width 64 --epochs 100

FOLDER has train/<class>/ and test/<class>/; without it the pictures are the built-in synthetic
shapes. Every run is one of resnet50_test.py, with the same flags except those for mixing and the
seed, which also divides the pictures into training and validation.

1. Tuning: the methods with an {alpha} are trained with each of --alphas, with --tuning_seeds seeds.
   The alpha with the highest mean accuracy on the validation pictures is taken.
2. Final: every method with --seeds other seeds, on the test pictures, which had no part in any
   choice.
   Seed by seed, each is compared with none and with the first tuned method (fixed mixup).

The output has results.jsonl, summary.json, table.md, accuracy.png, alphas.png and the runs' own
folders, with the policies' pictures. Started again with the same flags, a study goes on where it
was stopped, within a run too.
"""

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import studies
from benchmarks.common import machine
from utils.errors import UserError
from utils.reporting.console import duration
from utils.reporting.metrics import read_metrics

ENTRY = Path(__file__).resolve().parents[1] / "resnet50_test.py"
METHODS = {
    "none": "",
    "fixed": "--mixup fixed --alpha {alpha}",
    "cutmix": "--cutmix_alpha 1 --mixup_prob 0.5",  # as its paper has it for CIFAR
    "meta": "--mixup meta --alpha {alpha}",
}


@dataclass(frozen=True)
class Run:
    """One run: its name, its flags for mixing, its seed."""

    label: str
    flags: str
    seed: int


@dataclass(frozen=True)
class Result:
    """Accuracies in per cent, of the last weights."""

    val: float | None  # None where there is no validation split
    test: float
    seconds: float


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.mixup_study", __doc__)
    add = parser.add_argument
    add("--methods", default=",".join(METHODS), help="of " + ", ".join(METHODS))
    add(
        "--variant", action="append", default=[], metavar="LABEL=FLAGS",
        help="one more method, as in 'meta-decay=--mixup meta --alpha {alpha} --meta_decay 1';\n"
        "may be repeated",
    )  # fmt: skip
    add("--train_samples", type=int, default=5000)
    add("--val_fraction", type=float, default=0.1, help="of all training pictures (default: 0.1)")
    add("--epochs", type=int, default=30)
    add("--width", type=int, default=16, help="channels of the first stage (default: 16)")
    add("--batch", type=int, default=128)
    add("--alphas", type=float, nargs="+", default=[0.1, 0.2, 0.5, 1.0])
    add("--tuning_seeds", type=int, default=2, help="for each alpha (default: 2)")
    add("--seeds", type=int, default=5, help="of each method (default: 5)")
    add("--precision", choices=("fp32", "bf16"), default="bf16")
    add("--flags", default="", help="further flags of all runs, as one word: '--lr 0.05'")
    options = parser.parse_args(argv)
    studies.require_one(options, "epochs", "width", "batch", "tuning_seeds", "train_samples")
    if options.seeds < 2:
        raise UserError("--seeds: an interval takes 2 or more")
    return options


def methods_of(options) -> dict[str, str]:
    """{label: flags}, in the order given. Raises UserError."""
    methods = {}
    for name in filter(None, options.methods.split(",")):
        if name not in METHODS:
            raise UserError(f"--methods: {name!r} is not one of {', '.join(METHODS)}")
        methods[name] = METHODS[name]
    for variant in options.variant:
        label, equals, flags = variant.partition("=")
        if not equals or label in methods or not label.replace("-", "").isalnum():
            raise UserError(f"--variant {variant}: LABEL=FLAGS with a new label is needed")
        methods[label] = flags
    return methods


def common_flags(options) -> list[str]:
    """The flags that all runs have."""
    return [
        *studies.data_flags(options), "--subset", str(options.train_samples),
        "--val_fraction", str(options.val_fraction), "--depth", "18",
        "--width", str(options.width), "--batch_size", str(options.batch),
        "--epochs", str(options.epochs), "--eval_every", str(options.epochs),
        "--warmup_epochs", str(round(0.05 * options.epochs, 3)),
        "--precision", options.precision, "--device", options.device,
        "--threads", str(options.threads), *shlex.split(options.flags),
    ]  # fmt: skip


class Runner:
    """Trains runs by the entry script, each in a process and a folder of its own.

    Args:
        folder: of the study.
        common: flags of every run.
        entry: the entry script.

    A subclass that keeps more of a run has another `result_class`, and overrides `read`.
    """

    result_class = Result

    def __init__(self, folder: Path, common: list[str], entry: Path = ENTRY):
        self.folder, self.common, self.entry = folder, common, entry
        self.path = folder / "results.jsonl"
        self.results: dict[Run, Result] = {}
        self._processes: set[subprocess.Popen] = set()
        self._lock, self._stopping = threading.Lock(), False
        with studies.writing(folder):
            (folder / "runs").mkdir(parents=True, exist_ok=True)
            records = studies.read_records(self.path)
        for record in records:
            if record["common"] == common:
                self.results[Run(**record["run"])] = self.result_class(**record["result"])

    def train(self, runs: list[Run], jobs: int) -> None:
        """Trains those without a result, with a line for each. Raises UserError."""
        left = [run for run in runs if run not in self.results]
        with ThreadPoolExecutor(jobs) as pool:
            started = {pool.submit(self._train, run): run for run in left}
            try:
                for done, future in enumerate(as_completed(started), 1):
                    run, result = started[future], future.result()
                    self.results[run] = result
                    self._keep(run, result)
                    val = "" if result.val is None else f"validation {result.val:.2f} %, "
                    print(
                        f"[{done}/{len(left)}] {run.label}, seed {run.seed}: {val}"
                        f"test {result.test:.2f} %, in {duration(result.seconds)}",
                        flush=True,
                    )
            except BaseException:
                self._stop()
                for future in started:
                    future.cancel()
                raise

    def _train(self, run: Run) -> Result:
        words = [*self.common, *shlex.split(run.flags)]
        folder = self.folder / "runs" / studies.run_name(f"{run.label}-seed{run.seed}", words)
        if (folder / "config.yaml").exists():
            arguments = ["--resume", str(folder)]
        else:
            arguments = [*words, "--seed", str(run.seed), "--output", str(folder)]
        summary = folder / "summary.json"
        if not summary.exists() or json.loads(summary.read_text())["status"] != "finished":
            with self._lock:
                if self._stopping:
                    raise UserError("stopped")
                process = subprocess.Popen(
                    [sys.executable, str(self.entry), *arguments],
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                    start_new_session=True,  # Ctrl-C ends this one, which then ends them
                    env=os.environ | {"OMP_NUM_THREADS": words[words.index("--threads") + 1]},
                )  # fmt: skip
                self._processes.add(process)
            error = process.communicate()[1]
            self._processes.discard(process)
            if process.returncode:
                last = studies.last_line(error)
                raise UserError(f"{run.label}, seed {run.seed}: {last} ({folder})")
        return self.read(folder)

    def read(self, folder: Path) -> Result:
        """What is kept of a finished run."""
        found = json.loads((folder / "summary.json").read_text())
        records = read_metrics(folder / "metrics.jsonl")
        val = [record["accuracy"] for record in records if record["split"] == "val"]
        return Result(val[-1] if val else None, found["test_accuracy"], found["seconds_total"])

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            for process in list(self._processes):  # the threads remove theirs meanwhile
                process.terminate()  # it saves, and goes on from there the next time

    def _keep(self, run: Run, result: Result) -> None:
        record = {"run": dataclasses.asdict(run), "result": dataclasses.asdict(result)}
        with studies.writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(record | {"common": self.common}) + "\n")


# ---- the study --------------------------------------------------------------------------------


def study(options) -> None:
    methods = methods_of(options)
    runner = Runner(options.output, common_flags(options))
    tuned = {label: flags for label, flags in methods.items() if "{alpha}" in flags}
    # The final runs have the seeds 1, 2, 3, ...; the tuning has others.
    tuning = {
        (label, alpha): [
            Run(f"{label}-alpha{alpha:g}", flags.format(alpha=alpha), 1000 + seed)
            for seed in range(options.tuning_seeds)
        ]
        for label, flags in tuned.items()
        for alpha in options.alphas
    }
    count = sum(map(len, tuning.values())), options.seeds * len(methods)
    print(f"{count[0]} runs to tune, {count[1]} final ones", flush=True)
    runner.train([run for runs in tuning.values() for run in runs], options.jobs)
    found = {key: [runner.results[run].val for run in runs] for key, runs in tuning.items()}
    chosen = {
        label: max(options.alphas, key=lambda alpha, label=label: sum(found[label, alpha]))
        for label in tuned
    }
    final = {
        label: [
            Run(label, flags.format(alpha=chosen.get(label)), seed)
            for seed in range(1, options.seeds + 1)
        ]
        for label, flags in methods.items()
    }
    # Seed by seed, so that a study that is stopped early still compares.
    by_seed = [run for runs in zip(*final.values(), strict=True) for run in runs]
    runner.train(by_seed, options.jobs)
    accuracy = {label: [runner.results[run].test for run in runs] for label, runs in final.items()}
    baselines = [label for label in methods if label == "none"] + list(tuned)[:1]
    summary = {
        "machine": machine(),
        "flags": runner.common,
        "methods": {
            label: {
                "flags": final[label][0].flags,
                "test_accuracy": accuracy[label],
                "mean": statistics.mean(accuracy[label]),
                "minus": {
                    base: studies.paired(accuracy[label], accuracy[base])
                    for base in baselines
                    if base != label
                },
            }
            for label in methods
        },
        "tuning": [
            {"method": label, "alpha": alpha, "val_accuracy": values}
            for (label, alpha), values in found.items()
        ],
    }
    plots = {"accuracy.png": draw_accuracy}
    if summary["tuning"]:
        plots["alphas.png"] = draw_alphas
    studies.write_results(options.output, summary, table(summary), plots)


def table(summary: dict) -> str:
    """Markdown."""
    methods = summary["methods"]
    bases = list(dict.fromkeys(base for one in methods.values() for base in one["minus"]))
    head = ["method", "flags", "test accuracy, % (lowest to highest seed)"]
    head += [f"minus {base} (95 %)" for base in bases]
    rows = []
    for label, one in methods.items():
        values = one["test_accuracy"]
        cells = [f"{one['mean']:.2f} ({min(values):.2f} to {max(values):.2f})"]
        for base in bases:
            found = one["minus"].get(base)
            cells.append(f"{found['mean']:+.2f} ± {found['half']:.2f}" if found else "")
        rows.append([label, f"`{one['flags']}`" if one["flags"] else "", *cells])
    return studies.markdown(head, rows, left=2)


def draw_accuracy(summary: dict, path: Path) -> None:
    """A line across the methods for each seed, and the means."""
    from matplotlib.figure import Figure

    methods = summary["methods"]
    figure = Figure(figsize=(1.6 * len(methods) + 2, 4), layout="constrained")
    axis = figure.subplots()
    places = range(len(methods))
    for values in zip(*(one["test_accuracy"] for one in methods.values()), strict=True):
        axis.plot(places, values, color="tab:gray", marker=".", alpha=0.5, lw=0.8)
    means = [one["mean"] for one in methods.values()]
    axis.plot(places, means, "_", color="tab:red", ms=30, mew=2.5, label="mean of the seeds")
    axis.set_xticks(places, methods)
    axis.set_ylabel("test accuracy (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def draw_alphas(summary: dict, path: Path) -> None:
    """Validation accuracy by alpha."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for label in dict.fromkeys(one["method"] for one in summary["tuning"]):
        mine = [one for one in summary["tuning"] if one["method"] == label]
        alphas = [one["alpha"] for one in mine]
        (line,) = axis.plot(
            alphas, [statistics.mean(one["val_accuracy"]) for one in mine], marker="o", label=label
        )
        for one in mine:
            points = one["val_accuracy"]
            axis.plot([one["alpha"]] * len(points), points, ".", color=line.get_color(), alpha=0.5)
    axis.set_xscale("log")
    axis.set_xlabel("alpha")
    axis.set_ylabel("validation accuracy (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: study(options_of(argv)), "where it was")


if __name__ == "__main__":
    sys.exit(main())
