"""The same network on the same real pictures, by the usual loop and by ours: accuracy over time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.contenders import Usual, Way, usual_loader, usual_pictures, without_end
from benchmarks.loop import make_trainer, silent
from utils.augment.crop_flip import CropFlip
from utils.data.image_loader import ImageLoader
from utils.data.images import ImageData
from utils.data.splits import stratified_subset
from utils.models.resnet import ResNet
from utils.optim.schedules import Schedule
from utils.signals import Signals
from utils.training.evaluation import evaluate
from utils.training.objective import Precision


@dataclass(frozen=True)
class Race:
    """A training with SGD, one-cycle schedule, and no more than crop and flip.

    Attributes:
        pictures: of the training set.
        target: accuracy on the test pictures that is waited for, in per cent.
    """

    depth: int
    width: int
    batch: int
    epochs: int
    pictures: int
    lr: float
    target: float


def race(data: ImageData, plan: Race, device, precision: str, workers: int, folder: Path) -> dict:
    """{name: [(seconds of training, test accuracy) after each epoch]}, and what was trained.

    Evaluations are outside the clock; compiling and the first step are in it.
    """
    rows = stratified_subset(data.train.labels, plan.pictures, 0)
    images = data.train.images[rows if data.train.rows is None else data.train.rows[rows]]
    labels = data.train.labels[rows]
    torch.manual_seed(0)
    model = ResNet(plan.depth, len(data.classes), plan.width)
    test = ImageLoader(
        data.test.images, data.test.labels, mean=data.mean, std=data.std, batch_size=500,
        device=device, rows=data.test.rows,
    )  # fmt: skip
    steps = len(labels) // plan.batch
    schedule = Schedule("onecycle", plan.epochs * steps, plan.epochs * steps // 5)
    usual = {
        "plain loop": Way(False, "fp32, NCHW"),
        "autocast": Way(False, f"{precision}, channels_last", precision, True),
    }
    curves = {}
    for name, way in usual.items():
        print(f"  {name}", flush=True)
        curves[name] = _usual(way, model, images, labels, test, plan, schedule, device, workers)
    print("  ours", flush=True)
    with silent():
        curves["ours"] = _ours(
            model, images, labels, data, test, plan, schedule, device, precision, folder
        )
    what = (
        f"ResNet-{plan.depth} of width {plan.width} on {len(labels):,} real pictures, "
        f"{plan.epochs} epochs, batch {plan.batch}"
    )
    reached = {
        name: next((seconds for seconds, accuracy in curve if accuracy >= plan.target), None)
        for name, curve in curves.items()
    }
    return {"what": what, "target": plan.target, "curves": curves, "seconds_to_target": reached}


def _usual(way, model, images, labels, test, plan, schedule, device, workers) -> list:
    def sgd(parameters):
        return torch.optim.SGD(
            parameters, lr=plan.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )

    loader = usual_loader(usual_pictures(images, labels), plan.batch, workers, device)
    loop = Usual(way, model, without_end(loader), plan.batch, sgd, device)
    loop.optimizer.param_groups[0]["base_lr"] = plan.lr
    step, seconds, curve = 0, 0.0, []
    for _ in range(plan.epochs):
        started = time.perf_counter()
        for _ in range(len(loader)):
            schedule.apply(loop.optimizer, step)
            loop.step(*next(loop.batches))
            step += 1
        seconds += time.perf_counter() - started
        loop.times.shares()
        precision = Precision(way.precision, device)
        curve.append((seconds, evaluate(loop.model, test.epoch(), precision).accuracy))
    return curve


def _ours(
    model, images, labels, data, test, plan, schedule, device, precision: str, folder: Path
) -> list:
    loader = ImageLoader(
        images, labels, mean=data.mean, std=data.std, batch_size=plan.batch, device=device,
        augment=CropFlip(32, 32), shuffle=True,
    )  # fmt: skip
    model = model.to(device, memory_format=torch.channels_last)
    trainer = make_trainer(
        model, folder, Signals(), loader=loader, precision=precision, device=device, lr=plan.lr
    )
    trainer.schedule = schedule
    trainer.total_steps = plan.epochs * loader.steps_per_epoch
    curve = []

    def measure():
        result = evaluate(model, test.epoch(), trainer.precision)
        curve.append((trainer.progress.seconds_training, result.accuracy))
        return result

    trainer.evaluate, trainer.eval_every = measure, 1
    trainer.fit()
    return curve
