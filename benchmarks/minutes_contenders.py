"""Whom benchmarks/minutes.py measures, and by which setting, with its source.

All train from nothing. Where a documentation has settings for large pictures alone, they are used
with pictures of 32 pixels. AutoGluon is left out for pictures: it fine-tunes downloaded networks of
224 pixels, which from nothing learn little within minutes on a CPU.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOTH = ("cifar10", "ag_news")


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        folder: the samples to train on, all epochs, and the test set.
        seconds: for those that are given a time.
        output: folder of the result, which the contender makes.
        programs: folder of `python` and the commands of its environment.
    """

    data: str
    folder: Path
    epochs: int
    seconds: float
    seed: int
    output: Path
    programs: Path
    timm_script: Path | None

    @cached_property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def precision(self) -> str:
        """The faster one of bf16 and fp32."""
        import torch

        from utils.training.objective import resolve_precision

        return resolve_precision("fastest", torch.device(self.device))


def predictions(output: Path) -> float:
    """Accuracy in per cent, of the table that a run of this toolkit writes, and our scripts."""
    with open(output / "evaluated.csv", newline="", encoding="utf-8-sig") as file:
        right = [row["true"] == row["predicted"] for row in csv.DictReader(file)]
    return 100 * sum(right) / len(right)


def last_row(path: str, column: str, factor: float, output: Path) -> float:
    """Accuracy in per cent, which the contender itself writes after its last epoch."""
    with open(output / path, newline="") as file:
        return factor * float([*csv.DictReader(file)][-1][column])


@dataclass(frozen=True)
class Contender:
    """
    Attributes:
        command: Job -> the words of a command line.
        unit: what it is told: "budget", the seconds of the whole process; "seconds", those of the
            training alone; "samples", how many it trains on in all epochs.
        packages: those of its environment; none: it runs in the environment of the benchmark.
        shares: whether its environment also has the packages of the benchmark's.
        most_epochs: those of its documentation, or so many that more would only overfit.
    """

    command: Callable[[Job], list]
    unit: str = "samples"
    packages: tuple[str, ...] = ()
    data: tuple[str, ...] = BOTH
    accuracy: Callable[[Path], float] = predictions
    shares: bool = True
    most_epochs: float = math.inf


def ours(job: Job) -> list:
    program = [job.programs / "python", ROOT / "train.py", job.folder]
    return [*program, "--time", f"{job.seconds:g}s", *_of_run(job)]


def recipe(job: Job) -> list:
    entry, name = {
        "cifar10": ("resnet50_test.py", "cifar10_10min_cpu.yaml"),
        "ag_news": ("transformer_test.py", "ag_news_cpu.yaml"),
    }[job.data]
    program = [job.programs / "python", ROOT / entry, "--config", ROOT / "recipes" / name]
    return [*program, "--data_dir", job.folder, "--time", f"{job.seconds:g}s", *_of_run(job)]


def _of_run(job: Job) -> list:
    cache = job.output.parent / "cache"
    return ["--seed", job.seed, "--output", job.output, "--cache_dir", cache]


def timm(job: Job) -> list:
    """https://huggingface.co/docs/timm/training_script: "These hparams (or similar) work well for a
    wide range of ResNet architecture", with ResNet-18: rate 0.1 for 2 x 112 pictures, weight decay
    1e-4, cosine, random erasing 0.4, 5 of 160 epochs of warm-up."""
    own = ["--amp", "--amp-dtype", "bfloat16"] if job.precision == "bf16" else []
    return [
        job.programs / "python", job.timm_script, "--data-dir", job.folder,
        "--train-split", "train", "--val-split", "test", "--num-classes", 10, "--model", "resnet18",
        "--img-size", 32, "--epochs", job.epochs, "--sched", "cosine", "--sched-on-updates",
        "--lr", 0.1, "-b", 224, "--weight-decay", 1e-4, "--reprob", 0.4, "--remode", "pixel",
        "--warmup-epochs", min(5, job.epochs // 32), "--val-interval", job.epochs, "-j", 2,
        "--seed", job.seed, "--device", job.device, "--output", job.output.parent,
        "--experiment", job.output.name, *own,
    ]  # fmt: skip


def ultralytics(job: Job) -> list:
    """https://docs.ultralytics.com/datasets/classify/cifar10: the smallest network, imgsz=32; its
    .yaml is without weights. `time` limits the training, without start and test, in hours. 64 is
    its "nominal batch size". By default, where there is no third split, it tests after each epoch
    and keeps the weights that are best on the test set; not so with val=False."""
    return [
        job.programs / "yolo", "classify", "train", f"data={job.folder}", "model=yolo26n-cls.yaml",
        "pretrained=False", "imgsz=32", f"time={job.seconds / 3600:.6f}", "batch=64", "val=False",
        "plots=False", f"seed={job.seed}", f"project={job.output.parent}",
        f"name={job.output.name}",
    ]  # fmt: skip


def script(name: str, job: Job) -> list:
    """One of benchmarks/minutes_scripts, which name their sources."""
    amount = f"{job.seconds:.0f}" if name == "by_autogluon" else job.epochs
    path = ROOT / "benchmarks/minutes_scripts" / f"{name}.py"
    own = [job.precision] if name == "by_transformers" else []
    return [job.programs / "python", path, job.folder, amount, job.seed, job.output, *own]


CONTENDERS = {
    "fewhours": Contender(ours, "budget"),
    "fewhours-recipe": Contender(recipe, "budget"),
    "timm": Contender(
        timm, packages=("timm==1.0.31",), data=("cifar10",), most_epochs=160,
        accuracy=partial(last_row, "summary.csv", "eval_top1", 1),
    ),
    "ultralytics": Contender(
        ultralytics, "seconds", ("ultralytics==8.4.190",), ("cifar10",),
        accuracy=partial(last_row, "results.csv", "metrics/accuracy_top1", 100),
    ),
    "fastai": Contender(
        partial(script, "by_fastai"), packages=("fastai==2.8.12",), most_epochs=50
    ),
    "transformers": Contender(
        partial(script, "by_transformers"),
        packages=("transformers[torch]==5.24.0", "datasets==5.2.0"), most_epochs=50,
    ),
    # Its pins exclude the present PyTorch, which these models do not need.
    "autogluon": Contender(
        partial(script, "by_autogluon"), "seconds",
        ("autogluon.tabular[catboost,lightgbm,xgboost]==1.6.3",), ("ag_news",), shares=False,
    ),
    "scikit-learn": Contender(
        partial(script, "by_sklearn"), packages=("scikit-learn==1.9.1", "scikit-image==0.26.0"),
        most_epochs=1,
    ),
}  # fmt: skip
