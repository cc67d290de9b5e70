#!/usr/bin/env python3
"""Each trick of the toolkit added to the plain loop that people write: time and accuracy.

    python -m benchmarks.tricks --data_dir FOLDER --output runs/tricks
    python -m benchmarks.tricks --data_dir FOLDER --output runs/tricks_gpu --device cuda \\
        --depth 50 --width 64 --samples 50000 --epochs 30 --precision bf16

FOLDER has train/<class>/ and test/<class>/; without it the pictures are the built-in synthetic
shapes. The plain loop has torchvision's transforms in a DataLoader, SGD with a one-cycle schedule,
fp32, and reads the loss in every step. Then resnet50_test.py trains the same network with the same
schedule, and each row of the table adds one flag to those before it. All tricks are trained with
one seed, then with the next, so that the drift of the machine is spread over them.

The output has results.jsonl, summary.json, table.md, tricks.png and the runs' own folders. Started
again with the same flags, it goes on where it was stopped.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import studies
from benchmarks.common import machine
from utils.errors import UserError

ENTRY = Path(__file__).resolve().parents[1] / "resnet50_test.py"
PLAIN = "plain loop"
# (trick, the flags it sets); a later one replaces the same flag of an earlier one.
TRICKS = [
    ("the toolkit's loader and loop", {
        "optimizer": "sgd", "lr": "{lr}", "sched": "onecycle", "channels_last": "false",
        "precision": "fp32", "fused": "none", "mixup": "none",
        # The start, the crop and the decay of the plain loop.
        "zero_init_residual": "false", "padding_mode": "zeros", "decay_all": "true",
    }),
    ("channels_last", {"channels_last": "true"}),
    ("mixed precision", {"precision": "{precision}"}),
    ("fused modules", {"fused": "speed"}),
    ("NGD", {"optimizer": "ngd", "lr": "{ngd_lr}"}),
    ("mixing", {"mixup": "auto"}),
]  # fmt: skip


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.tricks", __doc__, jobs=False)
    add = parser.add_argument
    add("--samples", type=int, default=5000, help="training pictures (default: 5000)")
    add("--epochs", type=int, default=8)
    add("--depth", type=int, choices=(18, 34, 50), default=18)
    add("--width", type=int, default=16, help="channels of the first stage (default: 16)")
    add("--batch", type=int, default=128)
    add("--lr", type=float, default=0.1, help="of SGD (default: 0.1)")
    add("--ngd_lr", type=float, default=0.02)
    add("--precision", choices=("bf16", "fp16"), default="bf16", help="of the mixed precision")
    add("--seeds", type=int, default=3)
    add("--workers", type=int, help="of the plain loop (default: 2; on a GPU the cores, up to 16)")
    options = parser.parse_args(argv)
    studies.require_one(options, "samples", "epochs", "width", "batch", "seeds")
    return options


def flags_of(options) -> dict[str, list[str]]:
    """{trick: the flags of its runs, those of the tricks before it included}."""
    shared = [
        *studies.data_flags(options), "--subset", str(options.samples),
        "--epochs", str(options.epochs), "--eval_every", str(options.epochs),
        "--depth", str(options.depth), "--width", str(options.width),
        "--batch_size", str(options.batch), "--device", options.device,
        "--threads", str(options.threads),
    ]  # fmt: skip
    found, so_far = {}, {}
    for trick, settings in TRICKS:
        so_far |= {name: value.format(**vars(options)) for name, value in settings.items()}
        own = [word for name, value in so_far.items() for word in (f"--{name}", value)]
        found[trick] = shared + own
    return found


def train(flags: list[str], seed: int, runs: Path) -> dict:
    """Runs the entry script in a folder of its own below `runs`; its figures."""
    folder = runs / studies.run_name(f"seed{seed}", flags)
    summary = folder / "summary.json"
    resume = ["--resume", str(folder)] if (folder / "config.yaml").exists() else None
    if not summary.exists() or json.loads(summary.read_text())["status"] != "finished":
        words = resume or [*flags, "--seed", str(seed), "--output", str(folder)]
        done = subprocess.run(
            [sys.executable, str(ENTRY), *words], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"{folder.name}: {studies.last_line(done.stderr)}")
    figures = json.loads(summary.read_text())
    return {"seconds": figures["seconds_training"], "accuracy": figures["test_accuracy"]}


def train_plainly(options, seed: int) -> dict:
    """The plain loop, in a process of its own."""
    import torch

    from benchmarks.child import Child
    from benchmarks.contenders import Way
    from benchmarks.speed import default_workers
    from benchmarks.time_to_accuracy import Race, Racer
    from utils.data.images.image_data import PictureRequest
    from utils.data.images.sources import load_image_data

    load = partial(
        load_image_data, "shapes" if options.data_dir is None else "imagefolder",
        PictureRequest(options.data_dir or Path("data"), options.cache_dir, image_size=32),
    )  # fmt: skip
    plan = Race(
        options.depth, options.width, options.batch, options.epochs, options.samples, options.lr,
        target=100,
    )  # fmt: skip
    workers = default_workers(torch.device(options.device))
    workers = workers if options.workers is None else options.workers
    way, device = Way(False, "fp32, NCHW"), torch.device(options.device)
    made = partial(Racer, way, load, plan, device, workers, options.output, seed)
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    with contextlib.closing(Child(made, environment)) as child:
        seconds, accuracy = child.call("curve")[-1]
    return {"seconds": seconds, "accuracy": accuracy}


def study(options) -> None:
    path, ways = options.output / "results.jsonl", flags_of(options)
    with studies.writing(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
        records = studies.read_records(path)
    plain = [f"{name}={value}" for name, value in sorted(vars(options).items()) if name != "seeds"]
    ways = {PLAIN: plain} | ways
    known = {(one["trick"], one["seed"]): one for one in records}
    found: dict[str, list[dict]] = {trick: [] for trick in ways}
    for seed in range(options.seeds):
        for trick, flags in ways.items():
            one = known.get((trick, seed))
            if one is None or one["flags"] != flags:
                figures = (
                    train_plainly(options, seed)
                    if trick == PLAIN
                    else train(flags, seed, options.output / "runs")
                )
                one = {"trick": trick, "seed": seed, "flags": flags} | figures
                with studies.writing(path), open(path, "a") as file:
                    file.write(json.dumps(one) + "\n")
            found[trick].append(one)
            print(
                f"seed {seed}, {trick}: {one['seconds']:.1f} s, {one['accuracy']:.2f} %", flush=True
            )
    summary = {"machine": machine(), "epochs": options.epochs, "tricks": figures_of(found)}
    studies.write_results(options.output, summary, table(summary), {"tricks.png": draw})


def figures_of(found: dict[str, list[dict]]) -> dict[str, dict]:
    """Of each trick: time and accuracy by seed, and how many times as fast as the plain loop it
    is, by seed."""
    plain = [one["seconds"] for one in found[PLAIN]]
    return {
        trick: {
            "seconds": [one["seconds"] for one in runs],
            "accuracy": [one["accuracy"] for one in runs],
            "faster": [before / one["seconds"] for before, one in zip(plain, runs, strict=True)],
        }
        for trick, runs in found.items()
    }


def table(summary: dict) -> str:
    """Markdown."""
    head = ["", "training, s", "times as fast as the plain loop", "test accuracy, %"]
    rows = []
    for number, (trick, one) in enumerate(summary["tricks"].items()):
        seconds, accuracy = (statistics.mean(one[key]) for key in ("seconds", "accuracy"))
        ranges = [f"({min(one[key]):.2f} to {max(one[key]):.2f})" for key in ("faster", "accuracy")]
        faster = statistics.median(one["faster"])
        rows.append([
            f"{'+ ' if number else ''}{trick}", f"{seconds:.1f}", f"{faster:.2f} {ranges[0]}",
            f"{accuracy:.2f} {ranges[1]}",
        ])  # fmt: skip
    return studies.markdown(head, rows)


def draw(summary: dict, path: Path) -> None:
    """Accuracy over time: a point for each run, a line through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    means = [
        (statistics.mean(one["seconds"]), statistics.mean(one["accuracy"]))
        for one in summary["tricks"].values()
    ]
    axis.plot(*zip(*means, strict=True), color="tab:gray", lw=0.8, alpha=0.6)
    for number, (trick, one) in enumerate(summary["tricks"].items()):
        (points,) = axis.plot(one["seconds"], one["accuracy"], "o", ms=4, alpha=0.6)
        axis.plot(
            *means[number], "s", ms=9, color=points.get_color(),
            label=f"{'+ ' if number else ''}{trick}",
        )  # fmt: skip
    axis.set_xlim(left=0)
    axis.set_xlabel(f"seconds of training, {summary['epochs']} epochs")
    axis.set_ylabel("test accuracy (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: study(options_of(argv)), "where it was")


if __name__ == "__main__":
    sys.exit(main())
