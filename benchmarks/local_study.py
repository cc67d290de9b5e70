#!/usr/bin/env python3
"""Local steps under several rules compared with DDP, at equal epochs: what they send, how far the
workers are from their mean, loss and accuracy.

    python -m benchmarks.local_study --data_dir FOLDER --output runs/local_study --jobs 2
    python -m benchmarks.local_study --output runs/tiny --epochs 1 --train_samples 256 --seeds 2

FOLDER has train/<class>/ and test/<class>/; without it the pictures are the built-in synthetic
shapes. Every run is one of resnet50_test.py: a ResNet-18 trained with SGD by four workers in one
process, with the same flags except those of the rule and the seed. DDP is `constant` with rounds of
one step, which it equals but for rounding. Nothing is chosen by the results, so there is no
validation split.

Before training it prints what each rule sends, by arithmetic. The output has results.jsonl,
summary.json, table.md, distance.png and the runs' own folders. Started again with the same flags, a
study goes on where it was stopped, within a run too.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import studies
from benchmarks.common import machine
from benchmarks.mixup_study import Result, Run, Runner
from utils.errors import UserError
from utils.local.rules import SyncRule, simulate
from utils.optim.schedules import Schedule
from utils.reporting.metrics import read_metrics

BASE, WARMUP = 4, 0.05  # H_base; warm-up as a part of the epochs
DDP = "ddp"
# Label -> alpha relative to the peak learning rate. With 0.25 rounds grow only in the last part of
# the schedule, with 2.2 they are longer than H_base from the start.
QSR = {"qsr-0.25": 0.25, "qsr-1": 1.0, "qsr-2.2": 2.2}
CONSTANT = f"constant-{BASE}"
RULES = (DDP, CONSTANT, *QSR)


@dataclass(frozen=True)
class LocalResult(Result):
    """Attributes:
    train_loss, test_loss: of the last epoch, of the last weights.
    sent_of_ddp: see LocalSteps.
    distances: (epoch, distance of the workers from their mean) at every log line.
    """

    train_loss: float
    test_loss: float
    sent_of_ddp: float
    distances: list[list[float]]


class LocalRunner(Runner):
    result_class = LocalResult

    def read(self, folder: Path) -> LocalResult:
        found = json.loads((folder / "summary.json").read_text())
        return LocalResult(
            None,
            found["test_accuracy"],
            found["seconds_total"],
            found["train_loss"],
            found["test_loss"],
            found["sent_of_ddp"],
            [
                [record["epoch"], record["worker_distance"]]
                for record in read_metrics(folder / "metrics.jsonl")
                if "worker_distance" in record
            ],
        )


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.local_study", __doc__)
    add = parser.add_argument
    add("--rules", default=",".join(RULES), help=f"of {', '.join(RULES)}; {DDP} is always there")
    add("--train_samples", type=int, default=10_000)
    add("--epochs", type=int, default=60)
    add("--width", type=int, default=8, help="channels of the first stage (default: 8)")
    add("--workers", type=int, default=4)
    add("--batch", type=int, default=32, help="of a worker (default: 32)")
    add("--lr", type=float, default=0.1, help="the highest (default: 0.1)")
    add("--seeds", type=int, default=3, help="of each rule (default: 3)")
    options = parser.parse_args(argv)
    studies.require_one(options, "epochs", "width", "batch", "workers", "train_samples")
    if options.seeds < 2:
        raise UserError("--seeds: an interval takes 2 or more")
    options.rules = [DDP, *(name for name in options.rules.split(",") if name != DDP)]
    for name in options.rules:
        if name not in RULES:
            raise UserError(f"--rules: {name!r} is not one of {', '.join(RULES)}")
    return options


def common_flags(options) -> list[str]:
    """The flags that all runs have."""
    return [
        *studies.data_flags(options), "--subset", str(options.train_samples), "--depth", "18",
        "--width", str(options.width), "--batch_size", str(options.batch),
        "--epochs", str(options.epochs), "--eval_every", str(options.epochs),
        "--warmup_epochs", str(WARMUP * options.epochs), "--lr", str(options.lr),
        "--strategy", "local", "--local_workers", str(options.workers),
        "--device", options.device, "--threads", str(options.threads),
    ]  # fmt: skip


def rules_of(options) -> dict[str, str]:
    """{label: flags}; the first is DDP."""
    rules = {DDP: "--sync_rule constant --sync_base 1"}
    rules[CONSTANT] = f"--sync_rule constant --sync_base {BASE}"
    for label, ratio in QSR.items():
        alpha = ratio * options.lr
        rules[label] = f"--sync_rule qsr --sync_base {BASE} --qsr_alpha {alpha:.6g}"
    return {label: rules[label] for label in options.rules}


def foretold(options) -> dict[str, float]:
    """What each rule sends, relative to DDP, by arithmetic."""
    epoch = -(-options.train_samples // (options.batch * options.workers))
    total, warmup = options.epochs * epoch, round(WARMUP * options.epochs * epoch)
    factor = Schedule("cosine", total, warmup).factor
    rules = {
        DDP: SyncRule("constant", total),
        CONSTANT: SyncRule("constant", total, BASE),
    }
    for label, ratio in QSR.items():
        rules[label] = SyncRule(
            "qsr", total, BASE, ratio * options.lr, peak_lr=options.lr, warmup_steps=warmup
        )
    return {
        label: len(simulate(rule, lambda step: options.lr * factor(step))) / total
        for label, rule in rules.items()
        if label in options.rules
    }


def study(options) -> None:
    runner, rules = LocalRunner(options.output, common_flags(options)), rules_of(options)
    shares = foretold(options)
    for label, share in shares.items():
        print(f"{label:12} sends {100 * share:.1f} % of DDP's bytes, by arithmetic", flush=True)
    runs = {
        label: [Run(label, flags, seed) for seed in range(1, options.seeds + 1)]
        for label, flags in rules.items()
    }
    # Seed by seed, so that a study that is stopped early still compares.
    runner.train([run for each in zip(*runs.values(), strict=True) for run in each], options.jobs)
    results = {label: [runner.results[run] for run in each] for label, each in runs.items()}
    baseline = [result.test for result in results[DDP]]
    summary = {
        "machine": machine(),
        "flags": runner.common,
        "rules": {
            label: {
                "flags": rules[label],
                "foretold": shares[label],
                "sent_of_ddp": statistics.mean(r.sent_of_ddp for r in each),
                "test_accuracy": [r.test for r in each],
                "minus_ddp": studies.paired([r.test for r in each], baseline),
                "train_loss": [r.train_loss for r in each],
                "test_loss": [r.test_loss for r in each],
                "distances": each[0].distances,
            }
            for label, each in results.items()
        },
    }
    plots = {"distance.png": draw_distances}
    studies.write_results(options.output, summary, table(summary), plots)


def table(summary: dict) -> str:
    """Markdown."""
    head = ["rule", "of DDP's bytes", "distance at the end, %", "train loss", "test loss"]
    head += ["test accuracy, % (lowest to highest seed)", "minus ddp (95 %)"]
    rows = []
    for label, one in summary["rules"].items():
        values, found = one["test_accuracy"], one["minus_ddp"]
        last = 100 * one["distances"][-1][1] if one["distances"] else 0.0
        rows.append(
            [
                label,
                f"{100 * one['sent_of_ddp']:.1f} %",
                f"{last:.2f}",
                f"{statistics.mean(one['train_loss']):.4f}",
                f"{statistics.mean(one['test_loss']):.4f}",
                f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})",
                "" if label == DDP else f"{found['mean']:+.2f} ± {found['half']:.2f}",
            ]
        )
    return studies.markdown(head, rows)


def draw_distances(summary: dict, path: Path) -> None:
    """Of the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for label, one in summary["rules"].items():
        x, y = zip(*one["distances"], strict=True) if one["distances"] else ((), ())
        axis.plot(x, [100 * value for value in y], label=label, lw=1)
    axis.set_xlabel("epoch")
    axis.set_ylabel("workers from their mean (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: study(options_of(argv)), "where it was")


if __name__ == "__main__":
    sys.exit(main())
