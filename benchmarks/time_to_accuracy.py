"""Accuracy over time, same network and real pictures, by the usual loop and by ours."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.budget import Budget, attempt
from benchmarks.child import Child
from benchmarks.contenders import Rule, Usual, Way, usual_loader, usual_pictures, without_end
from benchmarks.loop import make_trainer
from utils.augment.crop_flip import CropFlip
from utils.data.images.image_data import ImageData
from utils.data.images.loader import ImageLoader
from utils.data.splits import stratified_subset
from utils.entry import environment_of_entries
from utils.launch.signals import Signals
from utils.machine.host_memory import keep_freed_memory
from utils.models.resnet import ResNet
from utils.optim.schedules import Schedule
from utils.training.evaluation import evaluate
from utils.training.objective import Precision


@dataclass(frozen=True)
class Race:
    """A training with SGD, one-cycle schedule, and no more than crop and flip.

    Attributes:
        pictures: of the training set.
        target: accuracy on the test pictures to reach, in per cent.
    """

    depth: int
    width: int
    batch: int
    epochs: int
    pictures: int
    lr: float
    target: float


@dataclass(frozen=True)
class Course:
    """What all contenders train.

    Attributes:
        images, labels: (n, 32, 32, 3) uint8 and (n,) int64, to train on; whole batches.
        model: on the CPU, as it is at the start.
        test: batches of the test pictures, on the device.
    """

    plan: Race
    data: ImageData
    images: np.ndarray
    labels: np.ndarray
    model: nn.Module
    test: ImageLoader
    device: torch.device

    @property
    def rule(self) -> Rule:
        return Rule("sgd", self.plan.lr, weight_decay=5e-4)

    @property
    def total_steps(self) -> int:
        return self.plan.epochs * len(self.labels) // self.plan.batch

    @property
    def schedule(self) -> Schedule:
        return Schedule("onecycle", self.total_steps)


def race(
    load: Callable[[], ImageData],
    plan: Race,
    device: torch.device,
    precision: str,
    workers: int,
    folder: Path,
    seconds: float,
) -> dict:
    """{name: [(seconds of training, test accuracy) after each epoch]}, and what was trained.

    Evaluations are not timed; compilation and the first step are. `left_out` has the reason for
    each contender that fails or is not done after `seconds` in all. Each trains in a process of its
    own, to which `load` is pickled.
    """
    budget, curves, left_out, course = Budget(seconds), {}, {}, None
    what = f"ResNet-{plan.depth} of width {plan.width}"
    with attempt("real pictures", budget.left, left_out):
        course = make_course(load(), plan, device)
        what += (
            f" on {len(course.labels):,} real pictures, {plan.epochs} epochs, batch {plan.batch}"
        )
    ways = {
        "plain loop": Way(False, "fp32, NCHW"),
        "autocast": Way(False, "channels_last", precision, True),
        "ours": Way(True, "channels_last", precision, True, keeps=device.type == "cpu"),
    }
    for name, way in ways.items() if course else ():
        print(f"  {name}", flush=True)
        with attempt(name, budget.left, left_out):
            made = partial(Racer, way, load, plan, device, workers, folder)
            child = Child(made, environment_of_entries() if way.ours else None)
            with contextlib.closing(child):
                curves[name] = child.call("curve")
    reached = {
        name: next((seconds for seconds, accuracy in curve if accuracy >= plan.target), None)
        for name, curve in curves.items()
    }
    return {
        "what": what, "target": plan.target, "curves": curves, "seconds_to_target": reached,
        "left_out": left_out,
    }  # fmt: skip


def make_course(data: ImageData, plan: Race, device: torch.device, seed: int = 0) -> Course:
    """With fewer pictures than planned if the data has fewer. Raises ValueError without a whole
    batch.

    Args:
        seed: of the choice of pictures, the weights, and the order of the usual loop.
    """
    pictures = min(plan.pictures, len(data.train)) // plan.batch * plan.batch
    if not pictures:
        raise ValueError(f"{len(data.train)} pictures are less than a batch of {plan.batch}")
    train = data.train.part(stratified_subset(data.train.labels, pictures, seed))
    test = ImageLoader(
        data.test.images, data.test.labels, mean=data.mean, std=data.std, batch_size=500,
        device=device, rows=data.test.rows,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = ResNet(plan.depth, len(data.classes), plan.width)
    images = train.images[train.rows]
    return Course(plan, data, images, train.labels, model, test, device)


class Racer:
    """A contender with its data. Args: those of `race` and `make_course`."""

    def __init__(
        self,
        way: Way,
        load,
        plan: Race,
        device: torch.device,
        workers: int,
        folder: Path,
        seed: int = 0,
    ):
        if way.keeps:
            keep_freed_memory()
        self.way, self.workers, self.folder = way, workers, folder
        self.course = make_course(load(), plan, device, seed)

    def curve(self) -> list[tuple[float, float]]:
        if self.way.ours:
            return our_curve(self.course, self.way.precision, self.folder)
        return usual_curve(self.way, self.course, self.workers)


def usual_curve(way: Way, course: Course, workers: int) -> list[tuple[float, float]]:
    plan, data, device = course.plan, course.data, course.device
    pictures = usual_pictures(course.images, course.labels, data.mean, data.std)
    loader = usual_loader(pictures, plan.batch, workers, device)
    loop = Usual(way, course.model, without_end(loader), plan.batch, course.rule, device)
    loop.optimizer.param_groups[0]["base_lr"] = plan.lr
    schedule, step, seconds, curve = course.schedule, 0, 0.0, []
    for _ in range(plan.epochs):
        started = time.perf_counter()
        for _ in range(len(loader)):
            schedule.apply(loop.optimizer, step)
            loop.step(*next(loop.batches))
            step += 1
        seconds += time.perf_counter() - started
        loop.times.fractions()
        precision = Precision(way.precision, device)
        curve.append((seconds, evaluate(loop.model, course.test.epoch(), precision).accuracy))
    return curve


def our_curve(course: Course, precision: str, folder: Path) -> list[tuple[float, float]]:
    plan, data, device = course.plan, course.data, course.device
    loader = ImageLoader(
        course.images, course.labels, mean=data.mean, std=data.std, batch_size=plan.batch,
        device=device, augment=CropFlip(32, 32), shuffle=True,
    )  # fmt: skip
    model = copy.deepcopy(course.model).to(device, memory_format=torch.channels_last)
    trainer = make_trainer(
        model, folder, Signals(), loader=loader, precision=precision, device=device,
        **course.rule.ours(),
    )  # fmt: skip
    trainer.steps.schedule, trainer.plan.total_steps = course.schedule, course.total_steps
    curve = []

    def measure(is_last: bool):
        result = evaluate(model, course.test.epoch(), trainer.steps.precision)
        curve.append((trainer.progress.seconds_training, result.accuracy))
        return result

    trainer.evaluate, trainer.plan.eval_every = measure, 1
    trainer.fit()
    return curve
