"""The toolkit's training loop over random pictures or texts, for the benchmarks that time it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import silent
from benchmarks.made_up import CPU, pictures
from utils.augment.crop_flip import CropFlip
from utils.checkpoints.checkpoint import Checkpoints
from utils.checkpoints.saver import Saver
from utils.data.images.loader import ImageLoader
from utils.distributed.group import Agreement
from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange
from utils.fused import fuse
from utils.launch.signals import AgreedSignal, Signals
from utils.local.rules import SyncRule
from utils.local.workers import Workers
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.optim.schedules import Schedule
from utils.optim.table import OPTIMIZERS
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.training.average import Average
from utils.training.controls import Freeze
from utils.training.guard import Guard
from utils.training.local.in_turn import loaders_of
from utils.training.local.steps import LocalSteps
from utils.training.log import TrainingLog
from utils.training.objective import Classification, Precision
from utils.training.progress import Progress
from utils.training.train_step import StepParts, TrainStep
from utils.training.trainer import Trainer, TrainingPlan

EPOCH = 400  # steps
STEPS = 10**6  # of the schedule; more than are ever taken


def narrow_resnet() -> torch.nn.Module:
    torch.manual_seed(0)
    return ResNet(18, 10, 16).to(memory_format=torch.channels_last)


class NoCheckpoints(Checkpoints):
    """Writing them is not what is measured, and would disturb it."""

    def save(self, checkpoint, *args, **kwargs):
        return self.folder


def make_trainer(
    model,
    folder: Path,
    signals: Signals,
    *,
    batch: int = 64,
    loader=None,
    precision: str = "fp32",
    frozen: bool = False,
    ema_decay: float | None = None,
    checkpoints: bool = False,
    optimizer: str = "sgd",
    accumulation: int = 1,
    exchange: Exchange | None = None,
    strategy: str = "ddp",
    device: torch.device = CPU,
    fused: str = "none",
    compiled: bool = False,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    decay_all: bool = False,
    round_steps: int | None = None,
) -> Trainer:
    """A trainer as the entries build it, over random pictures of 32x32 unless a `loader` is given;
    see `take_steps`. With an `exchange` it is one rank of several, each with `batch` samples; with
    `round_steps` a worker that averages its weights with the others after so many local steps.
    The model and the loader's batches are on `device` already."""
    folder.mkdir(parents=True, exist_ok=True)
    exchange = exchange or Exchange()
    fuse(model, fused)
    loader = loader or make_loader(batch, accumulation, exchange)
    console = Console()
    console.live = True  # the bar is part of what is timed
    arithmetic = Precision(precision, device)
    metrics = MetricsLog(folder / "metrics.jsonl")
    kind = Checkpoints if checkpoints else NoCheckpoints
    freeze = Freeze(model, "fc") if frozen else None
    if freeze is not None:
        freeze.apply(0)
    spread = build_strategy("local" if round_steps else strategy, model, exchange)
    agree = Agreement(exchange) if exchange.size > 1 else None
    schedule = Schedule("cosine", STEPS, 0)

    def make_parts(guard: Guard, progress: Progress) -> StepParts:
        return StepParts(
            strategy=spread,
            objective=Classification(
                torch.compile(spread.called) if compiled else spread.called,
                arithmetic,
                fused=fused != "none",
            ),
            optimizer=build_optimizer(
                optimizer,
                model,
                lr=lr,
                weight_decay=weight_decay,
                decay_all=decay_all,
                in_place_of=spread.optimized_tensor,
                exchange=spread.optimizer_exchange,
                **OPTIMIZERS[optimizer].products(precision),
            ),
            schedule=schedule,
            precision=arithmetic,
            progress=progress,
            guard=guard,
            average=Average(model, ema_decay, spread) if ema_decay else None,
        )

    if round_steps is None:
        steps = TrainStep(make_parts(Guard(model, spread), Progress()))
    else:
        workers = Workers.divide(exchange.size, exchange.rank, exchange.size)
        steps = LocalSteps(
            strategy=spread,
            make_parts=make_parts,
            workers=workers,
            loaders=loaders_of(loader, workers.own),
            exchange=exchange,
            rule=SyncRule("constant", STEPS, base=round_steps),
            progress=Progress(),
            seed=0,
        )
    return Trainer(
        steps=steps,
        loader=loader,
        plan=TrainingPlan(total_steps=0, eval_every=0),
        evaluate=lambda is_last: None,
        log=TrainingLog(console, metrics),
        saver=Saver(kind(folder / "checkpoints"), metrics, console),
        agreed_signal=AgreedSignal(signals, agree),
        freeze=freeze,
    )


def make_loader(batch: int, accumulation: int, exchange: Exchange) -> ImageLoader:
    """Random pictures."""
    return ImageLoader(
        *pictures(EPOCH * batch * exchange.size, np.random.default_rng(0)),
        mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=batch, device=CPU, augment=CropFlip(32, 32),
        shuffle=True, accumulation=accumulation, rank=exchange.rank, ranks=exchange.size,
    )  # fmt: skip


def take_steps(trainer: Trainer, steps: int) -> float:
    """Samples per second of `steps` more steps of the same run, without what happens at its end.
    Each counts as a whole batch: the loader's samples are a multiple of it."""
    before = trainer.progress.seconds_training
    trainer.plan.total_steps += steps
    trainer.fit()
    seconds = trainer.progress.seconds_training - before
    return steps * trainer.loader.batch_size / seconds


def steps_among_ranks(trainer: Trainer, exchange: Exchange) -> Callable[[int], float]:
    """work(steps) -> samples per second of this process; all processes begin together."""

    def work(steps: int) -> float:
        exchange.barrier()
        with silent():
            return take_steps(trainer, steps)

    return work
