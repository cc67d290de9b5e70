#!/usr/bin/env python3
"""A search that stops trials early, against random search without that, in the same space.

    python -m benchmarks.tuning --data_dir FOLDER --cache_dir CACHE --output runs/tuning_benchmark

FOLDER has train/<class>/ and test/<class>/; without it the pictures are the built-in synthetic
shapes. For each seed, both are searches of tuning/resnet50_tuning.sh over the space that is shipped
with it, with the same validation split and the same flags, but for `--sampler random --no_prune
--confirm 0` of random search. What each costs: samples trained, of all trials, stages and
confirmations, and seconds.

The best of many trials looks better than it is, so the setting that each search hands over is
trained again with --again further seeds, the same for both, which also draw new validation splits.
These runs decide the comparison; they do not count as cost.

The output has benchmark.json, benchmark.png and the studies. Started again with the same flags, it
goes on where it was stopped.
"""

import argparse
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import studies
from benchmarks.common import in_words, machine
from utils.errors import UserError
from utils.files import replace_file
from utils.plural import counted
from utils.reporting.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
METHODS = {
    "pruned": [],
    "random": ["--sampler", "random", "--no_prune", "--confirm", "0"],
}
# Points of accuracy by which the pruned search may be behind, and its share of the samples.
MARGIN, SHARE = 0.3, 0.5
FIRST_SEED = 1000  # of those with which settings are trained again


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.tuning", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="searches of each kind (default: 3)")
    add("--trials", type=int, default=30, help="of random search (default: 30)")
    add("--pruned_trials", type=int, default=24, help="of the other (default: 24)")
    add("--epochs", type=int, default=6, help="of a whole trial (default: 6)")
    add("--train_samples", type=int, default=4800, help="of a whole trial (default: 4800)")
    add("--val_fraction", type=float, default=0.1, help="of all training pictures (default: 0.1)")
    add("--width", type=int, default=8, help="channels of the first stage (default: 8)")
    add("--batch", type=int, default=32)
    add("--rungs", type=int, default=3, help="stages of a trial (default: 3)")
    add("--reduction", type=int, default=3)
    add("--again", type=int, default=5, help="further seeds of what is found (default: 5)")
    add("--precision", choices=("fp32", "bf16"), default="bf16")
    add("--flags", default="", help="further flags of all searches, as one word: '--mixup 0.2'")
    options = parser.parse_args(argv)
    studies.require_one(
        options, "seeds", "trials", "pruned_trials", "epochs", "train_samples", "width", "batch",
        "again",
    )  # fmt: skip
    return options


def flags_of(options, method: str, seed: int) -> list[str]:
    """The flags of one search."""
    data = studies.data_flags(options)
    if options.data_dir is not None:
        data += ["--image_size", "32"]
    trials = options.pruned_trials if method == "pruned" else options.trials
    stages = ["--rungs", str(options.rungs), "--reduction", str(options.reduction)]
    return [
        *data, "--depth", "18", "--width", str(options.width), "--batch_size", str(options.batch),
        "--precision", options.precision, "--device", options.device, "--threads",
        str(options.threads), "--epochs", str(options.epochs), "--subset",
        str(options.train_samples), "--val_fraction", str(options.val_fraction), "--trials",
        str(trials), "--jobs", str(options.jobs), "--seed", str(seed), *stages,
        *METHODS[method], *shlex.split(options.flags),
    ]  # fmt: skip


def search(folder: Path, flags: list[str]) -> dict:
    """Runs a search, or continues it; returns its report. Raises UserError, KeyboardInterrupt."""
    program = ["env", f"PYTHON={sys.executable}", "bash", str(ROOT / "tuning/resnet50_tuning.sh")]
    run_quietly([*program, *flags, "--output", str(folder)], show=True)
    return json.loads((folder / "report.json").read_text())


def run_quietly(words: list[str], show: bool = False) -> None:
    """Runs a program, whose last argument is a folder, to its end. `show`: with its output; Ctrl-C
    then reaches this process alone, which sends SIGTERM. Raises UserError, KeyboardInterrupt."""
    said = None if show else subprocess.DEVNULL
    process = subprocess.Popen(
        words, stdout=said, stderr=subprocess.PIPE, text=True, start_new_session=show
    )
    try:
        error = process.communicate()[1]
    except BaseException:
        process.send_signal(signal.SIGTERM)  # it stops its own processes, which save
        process.communicate()
        raise
    if process.returncode:
        raise UserError(f"{Path(words[-1])}: {studies.last_line(error)}")


def figures(report: dict) -> dict:
    """What a search found, and what it cost."""
    trials = sorted(report["trials"], key=lambda trial: trial["trial"])
    samples, so_far, curve = 0.0, None, []
    for trial in trials:
        samples += trial["samples"]
        if trial["state"] == "complete":
            so_far = trial["score"] if so_far is None else max(so_far, trial["score"])
        curve.append([samples, so_far])
    found = next(trial for trial in trials if trial["trial"] == report["handed_over"])
    curve.append([report["samples_trained"], found["score"]])
    return {
        "found": report["handed_over"],
        "score": found["score"],
        "default": trials[0]["score"],
        "settings": found["settings"],
        "samples": report["samples_trained"],
        "seconds": report["seconds"],
        "states": {s: sum(t["state"] == s for t in trials) for s in ("complete", "stopped early",
                                                                     "failed")},
        "curve": curve,
    }  # fmt: skip


def trained_again(folder: Path, number: int, options) -> list[float]:
    """Validation accuracies of a search's recipe, that of trial `number`, trained with other seeds
    by the command at the head of its file. Raises UserError, KeyboardInterrupt."""
    head = (folder / "best.yaml").read_text().splitlines()
    command = next(line for line in head if line.startswith("#   python "))
    words = shlex.split(command)[3:]
    words[words.index("best.yaml")] = str(folder / "best.yaml")

    def accuracy(seed: int) -> float:
        output = folder / f"again-trial{number}-seed{seed}"
        if not (output / "summary.json").exists():
            shutil.rmtree(output, ignore_errors=True)
            more = ["--seed", str(seed)]
            if options.data_dir is not None:
                more += ["--cache_dir", str(options.cache_dir.resolve())]
            entry = str(ROOT / "resnet50_test.py")
            run_quietly([sys.executable, entry, *words, *more, "--output", str(output)])
            shutil.rmtree(output / "checkpoints", ignore_errors=True)
        val = [r for r in read_metrics(output / "metrics.jsonl") if r.get("split") == "val"]
        return val[-1]["accuracy"]

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            return [*pool.map(accuracy, range(FIRST_SEED, FIRST_SEED + options.again))]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def summarize(found: dict[int, dict[str, dict]]) -> dict:
    """The comparison, from {seed: {method: figures}}."""
    pairs = [(one["pruned"], one["random"]) for one in found.values()]
    again = [[x - y for x, y in zip(a["again"], b["again"], strict=True)] for a, b in pairs]
    every = [one for part in again for one in part]
    shares = [a["samples"] / b["samples"] for a, b in pairs]
    return {
        "differences_in_search": [a["score"] - b["score"] for a, b in pairs],
        "differences": [statistics.mean(part) for part in again],
        "mean_difference": statistics.mean(every),
        "standard_error": statistics.stdev(every) / len(every) ** 0.5 if len(every) > 1 else None,
        "sample_shares": shares,
        "mean_sample_share": statistics.mean(shares),
        "second_shares": [a["seconds"] / b["seconds"] for a, b in pairs],
        "as_good": statistics.mean(every) >= -MARGIN,
        "at_most_half": statistics.mean(shares) <= SHARE,
    }


def table(found: dict[int, dict[str, dict]], summary: dict) -> str:
    """Markdown."""
    head = ["seed", "random, in the search", "pruned, in the search", "random, again"]
    head += ["pruned, again", "difference", "share of the samples", "of the seconds"]
    rows = []
    for index, (seed, one) in enumerate(found.items()):
        cells = [f"{one[method]['score']:.2f}" for method in ("random", "pruned")]
        cells += [f"{statistics.mean(one[method]['again']):.2f}" for method in ("random", "pruned")]
        cells.append(f"{summary['differences'][index]:+.2f}")
        cells += [f"{summary[name][index]:.2f}" for name in ("sample_shares", "second_shares")]
        rows.append([f"{seed}", *cells])
    error = summary["standard_error"]
    sure = f" ± {error:.2f}" if error is not None else ""
    means = [summary["mean_sample_share"], statistics.mean(summary["second_shares"])]
    rows.append(
        ["mean", "", "", "", "", f"{summary['mean_difference']:+.2f}{sure}"]
        + [f"{mean:.2f}" for mean in means]
    )
    return studies.markdown(head, rows)


def draw(found: dict[int, dict[str, dict]], path: Path) -> None:
    """Each search's best score over the samples trained, and its accuracy when trained again."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(found) + 1.8, 3.6), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, (seed, one) in zip(axes, found.items(), strict=True):
        for method, colour in (("random", "tab:gray"), ("pruned", "tab:blue")):
            curve = [(samples, best) for samples, best in one[method]["curve"] if best is not None]
            samples, best = zip(*curve, strict=True)
            samples = [count / 1000 for count in samples]
            axis.step(samples, best, where="post", color=colour, label=method)
            axis.plot(samples[-1], best[-1], "o", color=colour)
            again = one[method]["again"]
            error = statistics.stdev(again) / len(again) ** 0.5 if len(again) > 1 else 0.0
            axis.errorbar(samples[-1], statistics.mean(again), error, fmt="s", color=colour,
                          mfc="white", capsize=4, label=f"{method}, again")  # fmt: skip
        axis.axhline(statistics.mean(one["random"]["again"]) - MARGIN, color="tab:red", ls=":",
                     lw=1, label=f"random, again - {MARGIN:g}")  # fmt: skip
        axis.axvline(SHARE * one["random"]["samples"] / 1000, color="tab:red", ls="--", lw=1,
                     label="half of random's samples")  # fmt: skip
        axis.set_title(f"seed {seed}", fontsize=10)
        axis.set_xlabel("samples trained (thousands)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("best validation accuracy so far (%)")
    axes[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=110)


def benchmark(options) -> None:
    found: dict[int, dict[str, dict]] = {}
    for seed in range(options.seeds):
        found[seed] = {}
        for method in METHODS:
            folder = options.output / f"{method}-seed{seed}"
            print(f"== {method}, seed {seed}: {folder}", flush=True)
            its = figures(search(folder, flags_of(options, method, seed)))
            print(f"what it found, with {counted(options.again, 'further seed')}", flush=True)
            found[seed][method] = its | {"again": trained_again(folder, its["found"], options)}
    summary = summarize(found)
    state = machine() | {"optuna": version("optuna"), "jobs": options.jobs}
    state["threads"] = options.threads
    flags = [word for word in flags_of(options, "pruned", 0) if "/" not in word]
    result = {"machine": state, "flags": flags, "summary": summary, "searches": found}
    with studies.writing(options.output):
        replace_file(
            options.output / "benchmark.json", f"{json.dumps(result, indent=1)}\n".encode()
        )
        draw(found, options.output / "benchmark.png")
    print(f"\n{in_words(state)}\n\n{table(found, summary)}")
    verdicts = {True: "yes", False: "no"}
    print(f"within {MARGIN:g} points of random's best, on average: {verdicts[summary['as_good']]}")
    print(f"at most {SHARE:.0%} of its samples, on average: {verdicts[summary['at_most_half']]}")
    print(f"written to {options.output}")


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: benchmark(options_of(argv)), "where it was")


if __name__ == "__main__":
    sys.exit(main())
