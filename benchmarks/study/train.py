"""One run of the study: the toolkit's loader, model, objective and evaluation, in a bare loop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.common import side_by_side
from benchmarks.study.others import OTHERS
from benchmarks.study.plan import Case, Optimizer, Result, Run
from utils.augment.crop_flip import CropFlip
from utils.data.batch import Batch
from utils.data.images.decoded import DecodedSplit
from utils.data.images.image_data import ImageData, PictureRequest
from utils.data.images.loader import ImageLoader
from utils.data.images.sources import load_image_data
from utils.data.splits import stratified_order
from utils.errors import UserError
from utils.models.resnet import ResNet
from utils.models.vit import ViT
from utils.optim.factory import build_optimizer
from utils.optim.schedules import Schedule
from utils.optim.table import OPTIMIZERS
from utils.training.evaluation import evaluate
from utils.training.objective import Classification, Precision, stacked

DATA_SEED = 0  # which pictures train, validate and test: the same for every seed of the runs
WARMUP = 0.05  # fraction of the steps
EVALUATION_BATCH = 500
DEPTH = 18  # of the ResNet
VIT_LAYERS, VIT_PATCH, VIT_HEADS = 6, 4, 4  # blocks, side of a patch, attention heads
# Steps before the clock starts: NGD updates its Fisher matrices in each of its first ten. In a run
# of few steps they are a part of its cost that the seconds per epoch leave out.
UNTIMED_STEPS = 12


@dataclass(frozen=True)
class Setting:
    """What all runs of a study have in common; goes to its processes."""

    data_dir: Path | None  # None: the built-in synthetic shapes
    cache_dir: Path
    train_samples: int | None  # None: up to 10,000, two thirds of the training pictures at most
    val_samples: int | None  # None: half as many
    test_samples: int
    model: str  # "resnet" or "vit"
    width: int
    micro_batch: int | None  # samples that go through the model at once; None: the whole batch
    precision: str
    device: str
    threads: int


class Bench:
    """The pictures, cut as the setting says; trains single runs on them.

    Raises:
        UserError: the data is missing or has too few pictures.
    """

    def __init__(self, setting: Setting):
        torch.set_num_threads(setting.threads)
        self.setting, self.device = setting, torch.device(setting.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch finds no GPU here; use --device cpu")
        self.precision = Precision(setting.precision, self.device)
        self.data = load_image_data(
            "shapes" if setting.data_dir is None else "imagefolder",
            PictureRequest(setting.data_dir or Path(), setting.cache_dir),
        )
        self.splits = _cut(self.data, setting)

    def identity(self, *splits: str) -> dict:
        """What has to be equal for a result on these splits to be used again, besides its Run."""
        return {
            "data": self.data.fingerprint,
            "samples": {split: len(self.splits[split]) for split in splits},
            "model": _identity(self.setting),
            "precision": self.setting.precision,
            "device": self.device.type,
        }

    def loader(self, split: str, batch: int, seed: int = 0) -> ImageLoader:
        """`batch`: samples of a step, in micro-batches for training."""
        part, training = self.splits[split], split == "train"
        micro_batch = self.setting.micro_batch if training else None
        height, width = part.images.shape[1:3]
        return ImageLoader(
            part.images,
            part.labels,
            rows=part.rows,
            mean=self.data.mean,
            std=self.data.std,
            batch_size=min(batch, micro_batch or batch),
            step_size=batch,
            device=self.device,
            augment=CropFlip(height, width) if training else None,
            shuffle=training,
            seed=seed,
        )

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        height, width, channels = self.splits["train"].images.shape[1:]
        classes, dim = len(self.data.classes), self.setting.width
        if self.setting.model == "vit":
            model = ViT(
                classes, height, width, channels, VIT_PATCH, VIT_LAYERS, dim, VIT_HEADS,
                ffn=2 * dim, pooling="mean", positions="sincos",
            )  # fmt: skip
        else:
            stem = "cifar" if height <= 64 else "imagenet"
            model = ResNet(DEPTH, classes=classes, width=dim, stem=stem, channels=channels)
        return model.to(self.device, memory_format=torch.channels_last)

    def optimizer(self, model: nn.Module, of: Optimizer | Run, lr: float, weight_decay: float):
        if of.name in OTHERS:
            return OTHERS[of.name].make(model, lr, weight_decay, **dict(of.settings))
        own = OPTIMIZERS[of.name].products(self.setting.precision) | dict(of.settings)
        return build_optimizer(of.name, model, lr=lr, weight_decay=weight_decay, **own)

    def check(self, cases: list[Case]) -> None:
        """Raises UserError for a model that cannot be, or a setting that its optimizer does not
        take."""
        try:
            model = self.model(0)
        except ValueError as error:
            raise UserError(f"--model {self.setting.model}: {error}") from None
        for case in cases:
            one = case.optimizer
            try:
                self.optimizer(model, one, case.lr, one.weight_decay)
            except (TypeError, ValueError) as error:
                raise UserError(f"--variant {one.label}: {error}") from error

    def training_step(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        """micro-batch -> sums of its loss, its correct samples and its samples, (3,) float64. The
        last one of a step updates the weights."""
        objective = Classification(model, self.precision)

        def step(batch: Batch) -> torch.Tensor:
            loss, sums = objective(batch.inputs, batch.targets)
            (loss / batch.step_samples).backward()
            if batch.ends_step:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return stacked(sums, objective.sums)

        return step

    def train(self, run: Run) -> Result:
        """Trains from scratch and evaluates once, at the end. A run whose loss is not finite ends
        with the epoch."""
        started = time.perf_counter()
        model = self.model(run.seed)
        optimizer = self.optimizer(model, run, run.lr, run.weight_decay)
        loader = self.loader("train", run.batch, run.seed)
        total = max(1, round(run.epochs * loader.steps_per_epoch))
        schedule = Schedule("cosine", total, math.ceil(WARMUP * total))
        try:
            train_loss = self._fit(
                self.training_step(model, optimizer), loader, schedule, optimizer
            )
        except torch.linalg.LinAlgError:  # the optimizer decomposed what is not finite
            train_loss = math.nan
        if not math.isfinite(train_loss):
            return Result(None, None, time.perf_counter() - started)
        evaluation = evaluate(
            model, self.loader(run.split, EVALUATION_BATCH).epoch(), self.precision
        )
        # Weights that the last step has spoilt show in this loss alone.
        accuracy = evaluation.accuracy if math.isfinite(evaluation.loss) else None
        return Result(accuracy, train_loss, time.perf_counter() - started)

    def _fit(self, train_step, loader: ImageLoader, schedule: Schedule, optimizer) -> float:
        """All steps of the schedule; the mean training loss of the last epoch, or of the first
        one in which it is not finite."""
        step, loss = 0, math.nan
        while step < schedule.total_steps:
            sums = torch.zeros(3, dtype=torch.float64, device=self.device)
            for batch in loader.epoch(step // loader.steps_per_epoch):
                schedule.apply(optimizer, step)
                sums += train_step(batch)
                step += batch.ends_step
                if step >= schedule.total_steps:
                    break
            loss = float(sums[0] / sums[2])  # the host waits here
            if not math.isfinite(loss):
                break
        return loss

    def speeds(self, cases: list[Case], steps: int, repetitions: int) -> dict[str, list[float]]:
        """{label: samples per second of each turn}, the cases (of one batch size) side by side."""
        runs = {case.optimizer.label: self._timed(case, steps) for case in cases}
        return side_by_side(runs, repetitions)

    def _timed(self, case: Case, steps: int) -> Callable[[], float]:
        model, one = self.model(0), case.optimizer
        optimizer = self.optimizer(model, one, case.lr, one.weight_decay)
        train_step = self.training_step(model, optimizer)
        batches = _endless(self.loader("train", case.batch))

        def one_step() -> int:
            ends = False
            while not ends:
                batch = next(batches)
                train_step(batch)
                ends = batch.ends_step
            return batch.step_samples

        for _ in range(UNTIMED_STEPS):
            one_step()

        def turn() -> float:
            self._wait()
            started, samples = time.perf_counter(), 0
            for _ in range(steps):
                samples += one_step()
            self._wait()
            return samples / (time.perf_counter() - started)

        return turn

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def name_of(setting: Setting) -> str:
    if setting.model == "vit":
        return f"ViT of {VIT_LAYERS} blocks of width {setting.width}"
    return f"ResNet-{DEPTH} of width {setting.width}"


def _identity(setting: Setting) -> list:
    """The model, and the micro-batches, on which the statistics of BatchNorm and speeds depend."""
    vit = ["vit", VIT_LAYERS, VIT_PATCH, setting.width]
    model = vit if setting.model == "vit" else [DEPTH, setting.width]
    return model if setting.micro_batch is None else [*model, setting.micro_batch]


def _endless(loader: ImageLoader):
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def _cut(data: ImageData, setting: Setting) -> dict[str, DecodedSplit]:
    """Three splits without a common picture, each with the classes in proportion."""
    available = len(data.train)
    train = setting.train_samples or min(10_000, 2 * available // 3)
    val = setting.val_samples or min(train // 2, available - train)
    if train + val > available or val < 1:
        raise UserError(
            f"{train:,} training and {val:,} validation pictures are more than the "
            f"{available:,} there are: lower --train_samples or --val_samples"
        )
    order = stratified_order(data.train.labels, DATA_SEED)
    # In the order of the file the pages of a mapped cache are read one after another.
    parts = {"train": np.sort(order[:train]), "val": np.sort(order[train : train + val])}
    splits = {name: data.train.part(rows) for name, rows in parts.items()}
    test = stratified_order(data.test.labels, DATA_SEED)[: setting.test_samples]
    return splits | {"test": data.test.part(np.sort(test))}
