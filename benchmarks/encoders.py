#!/usr/bin/env python3
"""Texts with encoders that have read before: which way of training, and how fast.

    python -m benchmarks.encoders study --data_dir FOLDER --model ENCODER --output runs/study
    python -m benchmarks.encoders trainer --data_dir FOLDER --model ENCODER --output runs/trainer
    python -m benchmarks.encoders setfit --data_dir FOLDER --model ENCODER --output runs/setfit

FOLDER has the files of AG News, ENCODER is a name on the hub or a folder (--model of
transformer_test.py).

study: the Transformer here, and three ways of training the encoder, with 32 texts up to all of
them, and TF-IDF with logistic regression, which every run measures beside itself; the first 2,000
texts of the test file. Started again with the same flags, it goes on where it was.
trainer: the same encoder, texts, batches, epochs and rates in Hugging Face's Trainer, with batches
as it makes them and with its batches of texts of similar lengths; each in a process of its own, in
turn.
setfit: the same few texts as in the study, with the same seeds, by SetFit's own package: pairs of
texts, then logistic regression. --python: of an environment that has setfit besides what this
project needs.

The output has results.jsonl, trainer.json or setfit.jsonl, summary.json, table.md and the runs' own
folders.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import studies
from benchmarks.common import machine
from benchmarks.mixup_study import Result, Run, Runner
from utils.errors import UserError

ENTRY = Path(__file__).resolve().parents[1] / "transformer_test.py"
# Of few texts more epochs, for enough steps.
EPOCHS = {32: 30, 200: 10, 1000: 5, 5000: 3, None: 3}
WAYS = {
    "frozen": "--model {model} --pretrained --freeze_backbone",
    "fine-tuned": "--model {model} --pretrained --lr 0.0001 --epochs {epochs}",
    "adapters": "--model {model} --pretrained --lora 8 --epochs {epochs}",
    "own": "--config {recipes}/ag_news_cpu.yaml --epochs {own_epochs}",
}
TEST_TEXTS = 2000


@dataclass(frozen=True)
class Measured(Result):
    f1: float = float("nan")  # macro F1 on the test texts, in per cent
    baseline: float | None = None  # accuracy of TF-IDF with logistic regression, in per cent


class MeasuredRunner(Runner):
    result_class = Measured

    def read(self, folder: Path) -> Measured:
        found = json.loads((folder / "summary.json").read_text())
        baseline = (found["baseline"] or {}).get("accuracy")
        return Measured(
            None, found["test_accuracy"], found["seconds_total"], 100 * found["test_f1_macro"],
            baseline,
        )  # fmt: skip


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = studies.parser("benchmarks.encoders", __doc__)
    add = parser.add_argument
    add("what", choices=("study", "trainer", "setfit"))
    add("--model", required=True, help="encoder: a name on the hub, or a folder")
    add("--seeds", type=int, default=3, help="of each way, in the study (default: 3)")
    add("--sizes", type=int, nargs="+", help="numbers of texts, 0 for all (default: five)")
    add("--texts", type=int, default=2000, help="texts to train on, for trainer (default: 2000)")
    add("--repetitions", type=int, default=2, help="for trainer (default: 2)")
    add("--python", default=sys.executable, help="the Python that has setfit (default: this one)")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args(argv)
    studies.require_one(options, "seeds", "texts", "repetitions")
    if options.data_dir is None:
        raise UserError("--data_dir: name the folder with train.csv and test.csv of AG News")
    return options


def files_of(options) -> tuple[Path, Path]:
    """The training file, and a file with the first TEST_TEXTS texts of the test file."""
    train, test = options.data_dir / "train.csv", options.output / "test.csv"
    with studies.writing(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
        with open(options.data_dir / "test.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[:TEST_TEXTS]
        with open(test, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([row[0], " ".join(row[1:])] for row in rows)
    return train.resolve(), test.resolve()


def data_flags(options) -> list[str]:
    train, test = files_of(options)
    return [
        "--dataset", "csv", "--train_file", str(train), "--test_file", str(test), "--no_header",
        "--max_len", "128", "--cache_dir", str(options.cache_dir.resolve()), "--no_report",
        "--device", options.device, "--threads", str(options.threads), "--precision",
        options.precision,
    ]  # fmt: skip


# ---- the study --------------------------------------------------------------------------------


def study(options) -> None:
    common = [*data_flags(options), "--metrics", "f1_macro", "--eval_every", "1000"]
    runner = MeasuredRunner(options.output, common, ENTRY)
    sizes = [size or None for size in options.sizes] if options.sizes else [*EPOCHS]
    runs = {
        (size, way, seed): Run(f"{way}-{size or 'all'}", _flags(flags, size, options.model), seed)
        for seed in range(1, options.seeds + 1)
        for size in sizes
        for way, flags in WAYS.items()
    }
    print(f"{len(runs)} runs", flush=True)
    runner.train(list(runs.values()), options.jobs)
    rows = []
    for size in sizes:
        found = {
            way: [runner.results[runs[size, way, seed]] for seed in range(1, options.seeds + 1)]
            for way in WAYS
        }
        rows.append({"texts": size, "ways": {w: _figures(several) for w, several in found.items()}})
    summary = {"machine": machine(), "model": options.model, "rows": rows}
    studies.write_results(options.output, summary, table(summary), {})


def _flags(flags: str, size: int | None, model: str) -> str:
    epochs = EPOCHS.get(size, 5)
    words = flags.format(
        model=model, epochs=epochs, own_epochs=max(6, 2 * epochs), recipes=ENTRY.parent / "recipes"
    )
    return words if size is None else f"{words} --subset {size}"


def _figures(several: list[Measured]) -> dict:
    baselines = [one.baseline for one in several if one.baseline is not None]
    return {
        "accuracy": [one.test for one in several],
        "f1": [one.f1 for one in several],
        "minutes": statistics.mean(one.seconds for one in several) / 60,
        "baseline": statistics.mean(baselines) if baselines else None,
    }


def _with_range(values: list[float]) -> str:
    """Their mean, and half of their range."""
    return f"{statistics.mean(values):.1f} ± {(max(values) - min(values)) / 2:.1f}"


def table(summary: dict) -> str:
    """Markdown."""
    head = ["texts", "TF-IDF", *WAYS]
    rows = []
    for row in summary["rows"]:
        baselines = [one["baseline"] for one in row["ways"].values() if one["baseline"]]
        cells = [f"{statistics.mean(baselines):.1f}" if baselines else ""]
        for one in row["ways"].values():
            f1, accuracy = statistics.mean(one["f1"]), _with_range(one["accuracy"])
            cells.append(f"{accuracy}, F1 {f1:.1f}, {one['minutes']:.1f} min")
        rows.append([f"{row['texts']:,}" if row["texts"] else "all", *cells])
    return studies.markdown(head, rows)


# ---- against Hugging Face's Trainer -----------------------------------------------------------


def against_trainer(options) -> None:
    flags = data_flags(options)
    train, test = (flags[flags.index(f"--{name}_file") + 1] for name in ("train", "test"))
    folder = options.output.resolve()
    results: dict[str, list[dict]] = {}
    for repetition in range(options.repetitions):
        output = folder / f"ours-{repetition}"
        ours = [
            sys.executable, str(ENTRY), *flags, "--model", options.model, "--pretrained",
            "--subset", str(options.texts), "--epochs", "1", "--lr", "1e-4", "--head_lr", "1e-4",
            "--sched", "linear", "--warmup_ratio", "0", "--clip", "1", "--seed", str(repetition),
            "--batch_size", "32", "--output", str(output), "--eval_every", "0", "--no_baseline",
        ]  # fmt: skip
        for name, command in {
            "ours": ours,
            **{
                name: [
                    sys.executable, __file__, options.model, train, test, sampling,
                    str(options.texts), str(options.threads), str(repetition), options.precision,
                ]
                for name, sampling in (
                    ("Trainer", "random"), ("Trainer, similar lengths", "group_by_length"),
                )
            },
        }.items():  # fmt: skip
            started = time.perf_counter()
            done = subprocess.run(
                command, capture_output=True, text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
            )  # fmt: skip
            if done.returncode:
                raise UserError(f"{name}: {studies.last_line(done.stderr)}")
            if name == "ours":
                found = json.loads((output / "summary.json").read_text())
                result = {"rate": found["samples_per_second"], "accuracy": found["test_accuracy"]}
            else:
                result = json.loads(done.stdout.splitlines()[-1])
            result["seconds"] = time.perf_counter() - started
            results.setdefault(name, []).append(result)
            print(name, result, flush=True)
    best = statistics.median(one["rate"] for one in results["ours"])
    rows = []
    for name, several in results.items():
        rate = statistics.median(one["rate"] for one in several)
        accuracy = statistics.mean(one["accuracy"] for one in several)
        seconds = statistics.median(one["seconds"] for one in several)
        rows.append(
            [name, f"{rate:.1f}", f"{best / rate:.2f}", f"{accuracy:.1f}", f"{seconds:.0f}"]
        )
    head = ["", "texts/s in training", "ours is faster by", "accuracy, %", "whole process, s"]
    summary = {"machine": machine(), "model": options.model, "results": results}
    studies.write_results(options.output, summary, studies.markdown(head, rows), {})


def train_by_trainer(argv: list[str]) -> None:
    """Fine-tunes for an epoch by Hugging Face's Trainer; prints its figures as JSON."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    model, train, test, sampling, count, threads, seed, precision = argv
    torch.set_num_threads(int(threads))
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encoded(path: str, most: int | None = None) -> list[dict]:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[:most]
        ids = tokenizer([row[1] for row in rows], truncation=True, max_length=129)["input_ids"]
        return [
            {"input_ids": own, "labels": int(row[0]) - 1, "length": len(own)}
            for own, row in zip(ids, rows, strict=True)
        ]

    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=4)
    arguments = TrainingArguments(
        output_dir=f"{os.environ.get('TMPDIR', '/tmp')}/trainer-{os.getpid()}",
        num_train_epochs=1, learning_rate=1e-4, weight_decay=0.01, max_grad_norm=1.0,
        per_device_train_batch_size=32, per_device_eval_batch_size=32, seed=int(seed),
        lr_scheduler_type="linear", train_sampling_strategy=sampling, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=precision == "bf16",
    )  # fmt: skip
    trainer = Trainer(
        classifier, arguments, train_dataset=encoded(train, int(count)),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {
            "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
        },
    )  # fmt: skip
    rate = trainer.train().metrics["train_samples_per_second"]
    accuracy = 100 * trainer.evaluate(encoded(test))["eval_accuracy"]
    print(json.dumps({"rate": rate, "accuracy": accuracy}))


# ---- pairs of few texts -----------------------------------------------------------------------


def setfit(options) -> None:
    train, test = files_of(options)
    path, rows = options.output / "setfit.jsonl", []
    done = {(one["texts"], one["seed"]): one for one in studies.read_records(path)}
    for size in options.sizes or (32, 200):
        for seed in range(1, options.seeds + 1):
            if (size, seed) not in done:
                command = [
                    options.python, __file__, "--setfit", options.model, str(train), str(test),
                    str(size), str(seed), str(options.threads),
                ]  # fmt: skip
                child = subprocess.run(command, capture_output=True, text=True)
                if child.returncode:
                    raise UserError(f"setfit: {studies.last_line(child.stderr)}")
                done[size, seed] = json.loads(child.stdout.splitlines()[-1])
                with studies.writing(path), open(path, "a") as file:
                    file.write(json.dumps(done[size, seed]) + "\n")
                print(done[size, seed], flush=True)
        found = [done[size, seed] for seed in range(1, options.seeds + 1)]
        accuracies = [one["accuracy"] for one in found]
        minutes = statistics.mean(one["seconds"] for one in found) / 60
        rows.append([str(size), _with_range(accuracies), f"{minutes:.1f}"])
    summary = {"machine": machine(), "model": options.model, "results": list(done.values())}
    head = ["texts", "accuracy, %", "minutes"]
    studies.write_results(options.output, summary, studies.markdown(head, rows), {})


def train_by_setfit(argv: list[str]) -> None:
    """Trains on a subset as `--subset` takes it, with SetFit's defaults; prints its figures."""
    model, train, test, size, seed, threads = argv
    import torch
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    from utils.data.splits import stratified_subset

    torch.set_num_threads(int(threads))

    def rows_of(path: str) -> list[list[str]]:
        with open(path, newline="", encoding="utf-8") as file:
            return [[row[0], " ".join(row[1:])] for row in csv.reader(file)]

    rows = rows_of(train)
    kept = stratified_subset([int(row[0]) - 1 for row in rows], int(size), int(seed))
    few = Dataset.from_list([{"text": rows[i][1], "label": int(rows[i][0]) - 1} for i in kept])
    started = time.perf_counter()
    classifier = SetFitModel.from_pretrained(model)
    folder = f"{os.environ.get('TMPDIR', '/tmp')}/setfit-{os.getpid()}"
    # All pairs are the default, and too many of more texts; its paper has 20 for each text.
    pairs = {} if len(few) <= 64 else {"num_iterations": 20}
    arguments = TrainingArguments(
        output_dir=folder, seed=int(seed), report_to="none", save_strategy="no", **pairs
    )
    Trainer(classifier, args=arguments, train_dataset=few).train()
    seconds = time.perf_counter() - started
    tests = rows_of(test)
    guessed = classifier.predict([row[1] for row in tests], as_numpy=True)
    right = [float(int(row[0]) - 1 == guess) for row, guess in zip(tests, guessed, strict=True)]
    figures = {"accuracy": 100 * statistics.mean(right), "seconds": seconds}
    print(json.dumps({"texts": int(size), "seed": int(seed)} | figures))


def main(argv: list[str] | None = None) -> int:
    def act() -> None:
        options = options_of(argv)
        {"study": study, "trainer": against_trainer, "setfit": setfit}[options.what](options)

    return studies.exit_code(act, "where it was")


if __name__ == "__main__":
    if len(sys.argv) == 9 and not sys.argv[1].startswith("-") and Path(sys.argv[2]).is_file():
        train_by_trainer(sys.argv[1:])
    elif sys.argv[1:2] == ["--setfit"]:
        train_by_setfit(sys.argv[2:])
    else:
        sys.exit(main())
