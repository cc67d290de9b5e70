#!/usr/bin/env python3
"""Optimizers compared on real pictures, each tuned with the same budget.

    python -m benchmarks.study --data_dir FOLDER --output runs/study --jobs 2 --precision bf16
    python -m benchmarks.study --data_dir FOLDER --output runs/full --device cuda \\
        --precision bf16 --width 64 --train_samples 45000 --test_samples 10000 --epochs 100
    python -m benchmarks.study --data_dir FOLDER --output runs/vit --model vit --jobs 2 \\
        --optimizers lamb,adamw,muon,ngd --batches 2048 --micro_batch 128 --fractions 1 \\
        --trials 4 --timing_steps 4 --timing_repetitions 3

FOLDER has train/<class>/ and test/<class>/; without it the pictures are the built-in synthetic
shapes. A ResNet-18, or a ViT of six blocks on patches of 4 pixels, with crop-and-flip, a cosine
schedule and a warm-up of 5 % of the steps:

1. Timing: the optimizers in turn, a few steps at a time, at each batch size.
2. Tuning: each gets --trials runs of half of --epochs at each batch size, first over learning
   rates, then over weight decays. Chosen by accuracy on pictures held out of training; one seed.
3. Final: as tuned, at several lengths of training (--fractions), each with other seeds, on the
   test pictures, which had no part in any choice. The target is the first optimizer's mean
   accuracy at the full length.

The output has results.jsonl, summary.json, table.md, accuracy.png and learning_rates.png. Started
again with the same flags, a study goes on where it was stopped.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import studies
from benchmarks.common import in_words, machine
from benchmarks.study.others import CONTENDERS
from benchmarks.study.plan import Case, Optimizer, Plan, Result, Run, finished_runs, next_runs
from benchmarks.study.plots import draw_accuracy, draw_learning_rates
from benchmarks.study.pool import train_all
from benchmarks.study.store import Store
from benchmarks.study.summary import summarize, table
from benchmarks.study.train import Bench, Setting, name_of
from utils.errors import UserError
from utils.reporting.console import duration

WIDTHS = {"resnet": 8, "vit": 128}  # by default


def flags(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.study", __doc__)
    add = parser.add_argument
    add("--optimizers", default="sgd,adamw,muon,ngd", help="the first one is the baseline")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="LABEL=NAME:KEY=VALUE,...",
        help="one more optimizer with own settings, say ngd-channels=ngd:ngd_axes=channels;\n"
        "lr and weight_decay are where its search begins; may be repeated",
    )
    add("--train_samples", type=int, help="default: 10,000, or two thirds of a smaller set")
    add("--val_samples", type=int, help="held out for the tuning; default: half as many")
    add("--test_samples", type=int, default=5000)
    add("--model", choices=WIDTHS, default="resnet")
    widths = ", ".join(f"{width} with {model}" for model, width in WIDTHS.items())
    add("--width", type=int, help=f"of the ResNet's first stage or of the ViT (default: {widths})")
    add("--batches", type=int, nargs="+", default=[128, 1024], help="samples in a step")
    add("--micro_batch", type=int, help="at once, accumulated to a step (default: all of them)")
    add("--epochs", type=float, default=Plan.epochs, help="the full length (default: 10)")
    add("--fractions", type=float, nargs="+", default=list(Plan.fractions))
    add("--trials", type=int, default=Plan.trials, help="tuning runs of each (default: 6)")
    add("--seeds", type=int, default=Plan.seeds, help="final runs of each length (default: 3)")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add(
        "--timing_steps",
        type=int,
        default=8,
        help="of one turn (default: 8); a multiple of\nthe update period of NGD",
    )
    add("--timing_repetitions", type=int, default=5, help="turns (default: 5)")
    options = parser.parse_args(argv)
    options.width = WIDTHS[options.model] if options.width is None else options.width
    counts = ("width", "epochs", "trials", "seeds", "jobs", "threads", "test_samples")
    counts += ("timing_steps", "timing_repetitions")
    for name in counts:
        if getattr(options, name) <= 0:
            raise UserError(f"--{name} must be above 0, not {getattr(options, name):g}")
    if min(options.batches) < 2 or (options.micro_batch or 2) < 2:
        raise UserError("--batches, --micro_batch: BatchNorm needs at least 2 samples")
    if not all(0 < fraction <= 1 for fraction in options.fractions):
        raise UserError("--fractions lie above 0 and up to 1")
    if 1 not in options.fractions:
        raise UserError("--fractions: 1 must be among them: the target is of the full length")
    options.batches, options.fractions = (
        list(dict.fromkeys(values)) for values in (options.batches, options.fractions)
    )
    return options


def parse_optimizers(names: str, variants: list[str]) -> list[Optimizer]:
    """What --optimizers and --variant name, in this order. Raises UserError."""
    texts = [f"{name}={name}:" for name in names.split(",") if name]
    optimizers = []
    for text in texts + variants:
        label, _, rest = text.partition("=")
        name, _, pairs = rest.partition(":")
        if name not in CONTENDERS:
            raise UserError(
                f"unknown optimizer {name!r}: the optimizers are {', '.join(CONTENDERS)}"
            )
        if label in (one.label for one in optimizers):
            raise UserError(f"{label!r} is named twice: give the variant another label")
        settings = {}
        for pair in pairs.split(",") if pairs else ():
            key, equals, value = pair.partition("=")
            if not equals:
                raise UserError(f"--variant {text}: {pair!r} is not KEY=VALUE")
            settings[key] = parse_value(value)
        entry = CONTENDERS[name]
        lr = settings.pop("lr", entry.lr)
        decay = settings.pop("weight_decay", entry.weight_decay)
        optimizers.append(Optimizer(label, name, tuple(sorted(settings.items())), lr, decay))
    if not optimizers:
        raise UserError(f"--optimizers: name one or more of {', '.join(CONTENDERS)}")
    return optimizers


def parse_value(text: str):
    """A number, true, false or none; else the text itself."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: study(flags(argv)), "the finished runs")


def study(options: argparse.Namespace) -> None:
    optimizers = parse_optimizers(options.optimizers, options.variant)
    plan = Plan(options.epochs, tuple(options.fractions), options.trials, options.seeds)
    cases = [Case(one, batch) for batch in options.batches for one in optimizers]
    store = Store(options.output / "results.jsonl")
    bench = Bench(
        Setting(
            options.data_dir, options.cache_dir, options.train_samples, options.val_samples,
            options.test_samples, options.model, options.width, options.micro_batch,
            options.precision, options.device, options.threads,
        )
    )  # fmt: skip
    bench.check(cases)

    def setting_of(run: Run) -> dict:
        return bench.identity("train", run.split)

    results = store.results(setting_of)
    conditions = describe(bench, options)
    print(conditions)
    speeds = {
        batch: timing([case for case in cases if case.batch == batch], bench, store, options)
        for batch in options.batches
    }
    total, done = len(cases) * plan.runs, len(finished_runs(cases, plan, results))
    print(f"{total} runs, {done} of them done", flush=True)
    for run, result in train_all(bench, options.jobs, lambda: next_runs(cases, plan, results)):
        results[run] = result
        store.add_run(run, setting_of(run), result)
        done += 1
        print(f"[{done}/{total}] {in_one_line(run, result)}", flush=True)
    summary = {
        "title": title(bench),
        "conditions": conditions,
        "machine": machine(),
        "plan": dataclasses.asdict(plan),
        "setting": bench.identity("train", "val", "test"),
        "batches": summarize(cases, plan, results, speeds, len(bench.splits["train"])),
    }
    plots = {"accuracy.png": draw_accuracy, "learning_rates.png": draw_learning_rates}
    studies.write_results(options.output, summary, table(summary), plots)


def in_one_line(run: Run, result: Result) -> str:
    accuracy = "diverged" if result.accuracy is None else f"{run.split} {result.accuracy:.2f} %"
    return (
        f"{run.label}, batch {run.batch}, lr {run.lr:g}, weight decay {run.weight_decay:g}, "
        f"{run.epochs:g} epochs, seed {run.seed}: {accuracy} in {duration(result.seconds)}"
    )


def timing(cases: list[Case], bench: Bench, store: Store, options) -> dict[str, list[float]]:
    """The speeds of one batch size: measured, or as they were before a restart."""
    of = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "steps": options.timing_steps,
        "repetitions": options.timing_repetitions,
    }
    setting = bench.identity("train") | {"machine": machine()}
    speeds = store.timing(of, setting)
    if speeds is None:
        print(f"batch {cases[0].batch}: measuring the speed, in turns", flush=True)
        speeds = bench.speeds(cases, options.timing_steps, options.timing_repetitions)
        store.add_timing(of, setting, speeds)
    return speeds


def title(bench: Bench) -> str:
    pictures = len(bench.splits["train"])
    kind = "synthetic shapes" if bench.data.synthetic else bench.setting.data_dir.name
    return f"{name_of(bench.setting)} on {pictures:,} pictures of {kind}"


def describe(bench: Bench, options) -> str:
    """The data and the machine, one sentence each."""
    data, sizes = bench.data, {name: len(split) for name, split in bench.splits.items()}
    source = data.source if data.synthetic else f"{bench.setting.data_dir}"
    return (
        f"{sizes['train']:,} training, {sizes['val']:,} validation and {sizes['test']:,} test "
        f"pictures of {len(data.classes)} classes ({source}), {options.precision}. "
        f"{in_words(machine())}; jobs {options.jobs}."
    )


if __name__ == "__main__":
    sys.exit(main())
