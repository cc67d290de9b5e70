#!/usr/bin/env python3
"""`--mixup auto` against fixed strengths, where little and where much mixing is best.

    python -m benchmarks.mixup_auto --data_dir FOLDER --output runs/mixup_auto --jobs 2

FOLDER has train/<class>/ and test/<class>/, and for the settings of texts the files of AG News in
ag_news_csv/. A setting is a number of samples times a number of epochs: 1000x100, or texts:2000x12.
In every setting each method is trained with --choosing + --judging seeds. The --choosing seeds
choose the best fixed strength, which may be no mixing at all. With the others every method is
compared with it: the regret of a method is by how much its test accuracy is lower.

The output has results.jsonl, summary.json, table.md, regret.png and the runs' own folders. Started
again with the same flags, a study goes on where it was stopped, within a run too.
"""

import argparse
import math
import shlex
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import studies
from benchmarks.common import machine
from benchmarks.mixup_study import ENTRY, Run, Runner
from utils.errors import UserError

METHODS = {
    "none": "", "0.1": "--mixup 0.1", "0.5": "--mixup 0.5", "1": "--mixup 1",
    "auto": "--mixup auto",
}  # fmt: skip
FIXED = [label for label in METHODS if label != "auto"]
SETTINGS = ["1000x100", "2500x40", "10000x10", "10000x4", "texts:2000x12"]
TEXTS = "texts:"


class Setting(NamedTuple):
    name: str
    texts: bool
    samples: int
    epochs: int


def setting_of(name: str) -> Setting:
    """Raises UserError."""
    samples, times, epochs = name.removeprefix(TEXTS).partition("x")
    if not (times and samples.isdigit() and epochs.isdigit()):
        raise UserError(f"--settings: {name!r} is not SAMPLESxEPOCHS or {TEXTS}SAMPLESxEPOCHS")
    return Setting(name, name.startswith(TEXTS), int(samples), int(epochs))


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.mixup_auto", __doc__)
    add = parser.add_argument
    add("--settings", nargs="+", default=SETTINGS, help=f"(default: {' '.join(SETTINGS)})")
    add("--choosing", type=int, default=3, help="seeds that choose the best fixed strength")
    add("--judging", type=int, default=3, help="seeds that the regret is measured with")
    add("--width", type=int, default=8, help="channels of the first stage (default: 8)")
    add("--batch", type=int, default=128)
    add("--flags", default="", help="further flags of the runs on pictures: '--lr 0.05'")
    options = parser.parse_args(argv)
    studies.require_one(options, "choosing", "width", "batch")
    if options.judging < 2:
        raise UserError("--judging: an interval takes 2 or more")
    options.settings = [setting_of(name) for name in options.settings]
    return options


def runner_of(setting: Setting, options) -> Runner:
    """Trains the runs of a setting."""
    flags = [
        "--subset", str(setting.samples), "--epochs", str(setting.epochs),
        "--eval_every", str(setting.epochs), "--precision", "fp32", "--device", options.device,
        "--threads", str(options.threads),
    ]  # fmt: skip
    folder = options.output / setting.name.replace(":", "-")
    if not setting.texts:
        flags += [
            *studies.data_flags(options), "--depth", "18", "--width", str(options.width),
            "--batch_size", str(options.batch), *shlex.split(options.flags),
        ]  # fmt: skip
        return Runner(folder, flags)
    entry = ENTRY.with_name("transformer_test.py")
    if options.data_dir is None:
        data = ["--dataset", "headlines", "--layers", "1", "--dim", "64", "--heads", "2"]
    else:
        recipe = ENTRY.parent / "recipes/ag_news_cpu.yaml"
        data = ["--config", str(recipe), "--data_dir", str(options.data_dir.resolve())]
        data += ["--cache_dir", str(options.cache_dir.resolve())]
    return Runner(folder, [*data, *flags], entry)


def study(options) -> None:
    seeds = range(1, options.choosing + options.judging + 1)
    found = {}
    for setting in options.settings:
        runner = runner_of(setting, options)
        runs = [Run(label, flags, seed) for seed in seeds for label, flags in METHODS.items()]
        print(f"{setting.name}: {len(runs)} runs", flush=True)
        runner.train(runs, options.jobs)
        of = {run: runner.results[run] for run in runs}
        found[setting.name] = comparison(
            {label: [of[run].test for run in runs if run.label == label] for label in METHODS},
            {label: [of[run].seconds for run in runs if run.label == label] for label in METHODS},
            options.choosing,
        )
    regrets = {label: [one["regret"][label]["mean"] for one in found.values()] for label in METHODS}
    summary = {
        "machine": machine(),
        "settings": found,
        "mean_regret": {label: statistics.mean(values) for label, values in regrets.items()},
        "worst_regret": {label: max(values) for label, values in regrets.items()},
    }
    studies.write_results(options.output, summary, table(summary), {"regret.png": draw_regret})


def comparison(
    accuracy: dict[str, list[float]], seconds: dict[str, list[float]], choosing: int
) -> dict:
    """The best fixed strength of a setting, and the regret of each method.

    Args:
        accuracy, seconds: of each method, by seed; the first `choosing` seeds choose.
    """
    best = max(FIXED, key=lambda label: statistics.mean(accuracy[label][:choosing]))
    judged = {label: values[choosing:] for label, values in accuracy.items()}
    return {
        "accuracy": accuracy,
        "best": best,
        "mean": {label: statistics.mean(values) for label, values in judged.items()},
        "regret": {label: studies.paired(judged[best], judged[label]) for label in METHODS},
        # Geometric mean, as of ratios.
        "time": math.exp(
            statistics.mean(
                math.log(auto / fixed)
                for auto, fixed in zip(seconds["auto"], seconds["0.5"], strict=True)
            )
        ),
    }


def table(summary: dict) -> str:
    """Markdown."""
    head = ["setting", "best fixed", *METHODS, "regret of auto (95 %)", "time of auto over 0.5"]
    rows = [
        [
            name, one["best"], *(f"{one['mean'][label]:.2f}" for label in METHODS),
            f"{one['regret']['auto']['mean']:+.2f} ± {one['regret']['auto']['half']:.2f}",
            f"{one['time']:.2f}",
        ]
        for name, one in summary["settings"].items()
    ]  # fmt: skip
    for key in ("mean_regret", "worst_regret"):
        values = [f"{summary[key][label]:.2f}" for label in METHODS]
        rows.append([key.replace("_", " "), "", *values, "", ""])
    return studies.markdown(head, rows, left=2)


def draw_regret(summary: dict, path: Path) -> None:
    """The regret of every method in every setting."""
    from matplotlib.figure import Figure

    names = list(summary["settings"])
    figure = Figure(figsize=(1.5 * len(names) + 2.5, 4), layout="constrained")
    axis = figure.subplots()
    for number, label in enumerate(METHODS):
        regrets = [one["regret"][label] for one in summary["settings"].values()]
        places = [place + 0.12 * (number - len(METHODS) // 2) for place in range(len(names))]
        axis.errorbar(
            places, [-one["mean"] for one in regrets], [one["half"] for one in regrets],
            fmt="s" if label == "auto" else "o", ms=9 if label == "auto" else 5, lw=0.8, capsize=2,
            label=f"--mixup {label}",
        )  # fmt: skip
    axis.axhline(0, color="tab:gray", lw=0.8)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel("samples x epochs")
    axis.set_ylabel("points against the best fixed strength (95 %)")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: study(options_of(argv)), "where it was")


if __name__ == "__main__":
    sys.exit(main())
