#!/usr/bin/env python3
"""What helps where classes have very different numbers of samples.

    python -m benchmarks.imbalance --data_dir FOLDER --output runs/imbalance --jobs 2

FOLDER has train/<class>/ and test/<class>/, and for texts the files of AG News in ag_news_csv/.

pictures: the training pictures become long-tailed, as in Cui et al., "Class-balanced loss based on
effective number of samples" (2019): the first class keeps all of its own, the last one in a
hundred, those between fall exponentially. All test pictures are used.
texts: training and test texts of the classes are cut to 70, 20, 8 and 2 %.

Every method is trained with the same --seeds, and compared with none seed by seed. Macro F1 counts
all classes alike. The output has results.jsonl, summary.json, table.md, f1.png and the runs' own
folders. Started again with the same flags, a study goes on where it was stopped, within a run too.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import studies
from benchmarks.common import machine
from benchmarks.mixup_study import ENTRY, Result, Run, Runner
from utils.errors import UserError

METHODS = {
    "none": "",
    "weights sqrt": "--class_weights sqrt",
    "weights balanced": "--class_weights balanced",
    "sampler": "--class_sampler balanced",
    "logits": "--logit_adjustment 1",
    "focal": "--focal_gamma 2",
}
RATIO = 100  # of the largest class to the smallest, of the pictures
SHARES = (70, 20, 8, 2)  # of the texts, in per cent


@dataclass(frozen=True)
class Measured(Result):
    f1: float = float("nan")  # macro F1 on the test set, in per cent


class MeasuredRunner(Runner):
    result_class = Measured

    def read(self, folder: Path) -> Measured:
        found = json.loads((folder / "summary.json").read_text())
        return Measured(
            None, found["test_accuracy"], found["seconds_total"], 100 * found["test_f1_macro"]
        )


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.imbalance", __doc__)
    add = parser.add_argument
    add("--only", choices=("pictures", "texts"), help="(default: both)")
    add("--seeds", type=int, default=3, help="of each method (default: 3)")
    add("--picture_epochs", type=int, default=15)
    add("--text_epochs", type=int, default=12)
    add("--precision", help="(default: the recipe's: bf16 for pictures, fp32 for texts)")
    add("--width", type=int, default=16, help="channels of the first stage (default: 16)")
    options = parser.parse_args(argv)
    studies.require_one(options, "picture_epochs", "text_epochs", "width")
    if options.seeds < 2:
        raise UserError("--seeds: an interval takes 2 or more")
    if options.data_dir is None:
        raise UserError("--data_dir: name the folder with train/<class>/, or with ag_news_csv/")
    return options


def long_tail(largest: int, classes: int, ratio: float) -> list[int]:
    """Samples of each class, the first with `largest`, the last with a `ratio`-th of it."""
    if classes < 2:
        raise UserError("--data_dir: a long tail takes two classes or more")
    return [round(largest * ratio ** (-label / (classes - 1))) for label in range(classes)]


def link_pictures(source: Path, folder: Path, ratio: float = RATIO) -> None:
    """Makes `folder`, with links to a long tail of the training pictures and all test pictures."""
    names = sorted(path.name for path in (source / "train").iterdir() if path.is_dir())
    files = {name: sorted((source / "train" / name).iterdir()) for name in names}
    counts = long_tail(min(map(len, files.values())), len(names), ratio)
    for name, count in zip(names, counts, strict=True):
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
        for file in files[name][:count]:
            _link(folder / "train" / name / file.name, file)
    _link(folder / "test", source / "test")


def _link(path: Path, target: Path) -> None:
    if not path.is_symlink():
        path.symlink_to(target.resolve())


def cut_texts(source: Path, folder: Path, shares: Sequence[int] = SHARES) -> None:
    """Writes the parts of train.csv and test.csv, whose first column is the class, that have these
    shares; of the largest class all texts are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.csv", "test.csv"):
        with open(source / name, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        labels = sorted({row[0] for row in rows})
        if len(labels) != len(shares):
            raise UserError(f"{source / name}: {len(shares)} classes are needed")
        of_class = {label: [row for row in rows if row[0] == label] for label in labels}
        most = min(map(len, of_class.values()))
        counts = {
            label: round(most * share / max(shares))
            for label, share in zip(labels, shares, strict=True)
        }
        left = dict(counts)
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for row in rows:  # in their order
                if left[row[0]] > 0:
                    left[row[0]] -= 1
                    writer.writerow(row)


def runner_of(kind: str, options) -> Runner:
    """Prepares the data; returns what trains on them."""
    folder = (options.output / kind).resolve()
    common = ["--device", options.device, "--threads", str(options.threads)]
    common += ["--precision", options.precision] if options.precision else []
    common += ["--cache_dir", str(options.cache_dir.resolve()), "--metrics", "f1_macro"]
    with studies.writing(options.output):
        if kind == "texts":
            cut_texts(options.data_dir / "ag_news_csv", folder / "data")
            entry, epochs = ENTRY.with_name("transformer_test.py"), str(options.text_epochs)
            recipe = str(ENTRY.parent / "recipes/ag_news_cpu.yaml")
            files = {name: str(folder / "data" / f"{name}.csv") for name in ("train", "test")}
            flags = ["--config", recipe, "--dataset", "csv", "--train_file", files["train"]]
            flags += ["--test_file", files["test"]]
        else:
            link_pictures(options.data_dir, folder / "data")
            entry, epochs = ENTRY, str(options.picture_epochs)
            recipe = str(ENTRY.parent / "recipes/cifar10_cpu.yaml")
            flags = ["--config", recipe, "--dataset", "imagefolder", "--width", str(options.width)]
            flags += ["--data_dir", str(folder / "data")]
    return MeasuredRunner(
        folder, [*flags, *common, "--epochs", epochs, "--eval_every", epochs], entry
    )


def study(options) -> None:
    found = {}
    for kind in (options.only,) if options.only else ("texts", "pictures"):
        runner = runner_of(kind, options)
        runs = [
            Run(label.replace(" ", "-"), flags, seed)
            for seed in range(1, options.seeds + 1)
            for label, flags in METHODS.items()
        ]
        print(f"{kind}: {len(runs)} runs", flush=True)
        runner.train(runs, options.jobs)
        found[kind] = comparison(
            {
                label: [runner.results[run] for run in runs if run.flags == flags]
                for label, flags in METHODS.items()
            }
        )
    summary = {"machine": machine(), "data": found}
    studies.write_results(options.output, summary, table(summary), {"f1.png": draw_f1})


def comparison(results: dict[str, list[Measured]]) -> dict:
    """Figures of each method, and the differences from none."""
    f1 = {label: [one.f1 for one in several] for label, several in results.items()}
    return {
        label: {
            "flags": METHODS[label],
            "f1": f1[label],
            "accuracy": [one.test for one in several],
            "minus_none": studies.paired(f1[label], f1["none"]) if label != "none" else None,
        }
        for label, several in results.items()
    }


def table(summary: dict) -> str:
    """Markdown."""
    head = ["data", "flag", "macro F1, % (lowest to highest seed)", "minus none (95 %)"]
    rows = []
    for kind, methods in summary["data"].items():
        for one in methods.values():
            f1, difference = one["f1"], one["minus_none"]
            shown = "" if difference is None else (
                f"{difference['mean']:+.1f} ± {difference['half']:.1f}"
            )  # fmt: skip
            cells = [f"{statistics.mean(f1):.1f} ({min(f1):.1f} to {max(f1):.1f})", shown]
            accuracy = f"{statistics.mean(one['accuracy']):.1f}"
            rows.append([kind, f"`{one['flags']}`" if one["flags"] else "", *cells, accuracy])
    return studies.markdown([*head, "accuracy, %"], rows, left=2)


def draw_f1(summary: dict, path: Path) -> None:
    """Macro F1 of each seed and the means, a panel for each kind of data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(summary["data"]), 4), layout="constrained")
    axes = figure.subplots(1, len(summary["data"]), squeeze=False)[0]
    for axis, (kind, methods) in zip(axes, summary["data"].items(), strict=True):
        places = range(len(methods))
        for values in zip(*(one["f1"] for one in methods.values()), strict=True):
            axis.plot(places, values, color="tab:gray", marker=".", alpha=0.5, lw=0.8)
        means = [statistics.mean(one["f1"]) for one in methods.values()]
        axis.plot(places, means, "_", color="tab:red", ms=30, mew=2.5, label="mean of the seeds")
        axis.set_xticks(places, methods, rotation=20)
        axis.set_ylabel("macro F1 (%)")
        axis.set_title(kind)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    return studies.exit_code(lambda: study(options_of(argv)), "where it was")


if __name__ == "__main__":
    sys.exit(main())
