"""A run small enough to be repeated hundreds of times: used by the tests of the training loop."""

import contextlib
import functools
import json

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.augment.crop_flip import CropFlip
from utils.checkpoints.checkpoint import Checkpoints
from utils.checkpoints.saver import Saver
from utils.data.images.loader import ImageLoader
from utils.data.loader import HoldOut
from utils.distributed.strategies.base import build_strategy
from utils.engines.engine import RunFacts, choose_engine
from utils.engines.graphed_step import GraphedStep
from utils.exchange import Exchange
from utils.launch.signals import AgreedSignal
from utils.local.optimizer import OuterOptimizer
from utils.local.rules import SyncRule
from utils.local.workers import Workers
from utils.mixup.auto import AutoStrength
from utils.mixup.meta import PolicyMixup, SampleMixup, VirtualStep
from utils.mixup.mixing import Mixing
from utils.mixup.policy import MixupPolicy
from utils.optim.factory import build_optimizer
from utils.optim.multi_tensor import MultiTensor
from utils.optim.ngd.optimizer import NGD
from utils.optim.schedules import Schedule
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.runs.optimization import lr_scales
from utils.training.average import Average
from utils.training.controls import Freeze, MixingControl
from utils.training.evaluation import evaluate
from utils.training.guard import Guard
from utils.training.local.in_turn import loaders_of
from utils.training.local.norm_statistics import NormStatistics
from utils.training.local.steps import LocalSteps
from utils.training.log import TrainingLog
from utils.training.objective import Classification, Precision, mixed_cross_entropy
from utils.training.progress import Progress
from utils.training.train_step import StepParts, TrainStep
from utils.training.trainer import Trainer, TrainingPlan

CPU = torch.device("cpu")
CAPTURABLE = torch.optim.SGD, torch.optim.AdamW, MultiTensor, NGD
HELD_OUT = np.array([5, 8, 12, 20])  # of the samples of `loader`


class RefuseHostReads(TorchDispatchMode):
    """Fails where the host would wait for the device to read a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits here"
        assert func is not torch.ops.aten.equal.default, "the host waits here"
        return func(*args, **(kwargs or {}))


class NoSignals:
    """Stands for utils.launch.signals.Signals; a test sets `received`."""

    received = None

    def defer(self):
        pass


def pictures(n=23, size=8, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n, dtype=np.int64) % classes
    images = rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    images[..., 0] = np.clip(images[..., 0] // 3 + 60 * labels[:, None, None], 0, 255)
    return images, labels


def network(norm=True, dropout=0.0, classes=3, seed=1):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 6, 3, padding=1, bias=not norm)]
    layers += [nn.BatchNorm2d(6)] if norm else []
    layers += [nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, classes))
    return model.to(memory_format=torch.channels_last)


def loader(batch_size=4, accumulation=1, n=23, augment=True, shuffle=True, device=CPU, **options):
    images, labels = pictures(n)
    return ImageLoader(
        images,
        labels,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        batch_size=batch_size,
        device=device,
        accumulation=accumulation,
        augment=CropFlip(8, 8, padding=1) if augment else None,
        shuffle=shuffle,
        **options,
    )


def make_trainer(
    folder,
    *,
    epochs=3,
    batch_size=4,
    accumulation=1,
    optimizer="sgd",
    lr=0.05,
    model=None,
    precision="fp32",
    data=None,
    objective=None,
    signals=None,
    max_steps=None,
    dropout=0.2,
    val=False,
    device=CPU,
    schedule=None,
    ema_decay=None,
    freeze_until=None,
    save_steps=10**9,
    mixing=None,
    auto=False,
    clean_accuracy=False,
    exact=False,
    exchange=None,
    strategy="ddp",
    least=2,
    optimizer_options=None,
    layer_decay=None,
    clip=None,
    learner=None,
    advice=None,
    agreed_signal=None,
    momentum=0.9,
    local=None,
    balance=None,
    by_class=False,
    **plan,
):
    """A trainer over random pictures with BatchNorm and dropout, writing below `folder`.

    With an `exchange` it is one rank of several, and `batch_size` is that of each. `strategy`: its
    name, or what makes it as Strategy does. With `auto` the strength of mixing follows the loss of
    HELD_OUT. `learner` learns how to mix, in place of the usual one; `local`: see `local_steps`;
    `balance`: see Classification; `by_class`: see Loader; `plan`: see TrainingPlan."""
    folder.mkdir(parents=True, exist_ok=True)
    exchange = exchange or Exchange()
    ranks = {"rank": exchange.rank, "ranks": exchange.size, "least": least}
    train_ranks = ranks
    if local is not None:
        workers = Workers.divide(local["workers"], exchange.rank, exchange.size)
        train_ranks = ranks | {"rank": workers.own[0], "ranks": workers.size}
        strategy = "local"
    model = (model if model is not None else network(dropout=dropout)).to(device)
    hold_out = None
    if auto:
        mixing = Mixing(alpha=1.0, block=2, strength=AutoStrength(len(HELD_OUT), cost=1.0))
        hold_out = HoldOut(HELD_OUT, 23)
    data = data or loader(
        batch_size, accumulation, device=device, mixing=mixing, hold_out=hold_out,
        by_class=by_class, **train_ranks,
    )  # fmt: skip
    arithmetic = Precision(precision, device)
    agreed_signal = agreed_signal or AgreedSignal(signals or NoSignals())
    test = loader(5, n=12, augment=False, shuffle=False, device=device, **ranks)
    total = epochs * data.steps_per_epoch
    total = min(total, max_steps) if max_steps else total
    plan = {"log_every": 2, "eval_split": "val" if val else "test"} | plan
    metrics, console = MetricsLog(folder / "metrics.jsonl"), Console()
    store = Checkpoints(folder / "checkpoints", keep=100)
    build = functools.partial(build_strategy, strategy) if isinstance(strategy, str) else strategy
    spread = build(model, exchange, freeze_until is not None)
    inside = getattr(model, "mixes_inside", False)
    mixes = {"counts_mixing": mixing is not None, "mixes_inside": inside}
    mixes |= {"clean_accuracy": clean_accuracy, "balance": balance}
    objective = objective or Classification(spread.called, arithmetic, 0.1, **mixes)

    def make_parts(guard, progress):
        return StepParts(
            strategy=spread,
            objective=objective,
            optimizer=build_optimizer(
                optimizer,
                model,
                lr=lr,
                weight_decay=1e-3,
                momentum=momentum,
                in_place_of=spread.optimized_tensor,
                exchange=spread.optimizer_exchange,
                lr_scales=lr_scales(model, layer_decay, in_place_of=spread.optimized_tensor),
                **optimizer_options or {},
            ),
            schedule=schedule() if schedule else Schedule("cosine", total, 2),
            precision=arithmetic,
            progress=progress,
            guard=guard,
            clip=clip,
            average=ema_decay and Average(model, ema_decay, spread),
            meta=learner or (mixing and meta(spread, mixing, exact, device, balance)),
        )

    if local is None:
        steps = TrainStep(make_parts(Guard(model, spread), Progress()))
    else:
        steps = local_steps(local, spread, make_parts, data, exchange, total, objective)
    return Trainer(
        steps=steps,
        loader=data,
        plan=TrainingPlan(total, **plan),
        evaluate=lambda is_last: evaluate(
            model,
            test.epoch(),
            arithmetic,
            agreed_signal.arrived,
            exchange=exchange,
        ),
        log=TrainingLog(console, metrics, advice),
        saver=Saver(store, metrics, console, save_steps, exchange=local and exchange),
        agreed_signal=agreed_signal,
        freeze=freeze_until and Freeze(model, (f"{len(model) - 1}",), freeze_until),
        mixing_control=control(model, data, arithmetic, total, exchange) if auto else None,
    )


def local_steps(local, strategy, make_parts, data, exchange, total_steps, objective):
    """LocalSteps; `local` has `workers`, how many, `bn_batches`, `averages_state`, `outer` (the
    arguments of an OuterOptimizer), and what else SyncRule takes."""
    options = {"name": "constant", "bn_batches": 0} | local
    workers = Workers.divide(options.pop("workers"), exchange.rank, exchange.size)
    averages_state, outer = options.pop("averages_state", False), options.pop("outer", None)
    statistics = None
    if batches := options.pop("bn_batches"):
        statistics = NormStatistics(
            strategy.model, objective.logits, [data.of_rank(number) for number in workers.own],
            batches, workers, exchange,
        )  # fmt: skip
    return LocalSteps(
        strategy=strategy,
        make_parts=make_parts,
        workers=workers,
        loaders=loaders_of(data, workers.own),
        exchange=exchange,
        rule=SyncRule(total_steps=total_steps, **options),
        progress=Progress(),
        seed=0,
        statistics=statistics,
        averages_state=averages_state,
        make_outer=outer and functools.partial(OuterOptimizer, **outer),
    )


def control(model, data, precision, total_steps, exchange):
    """What adjusts the strength of the loader's mixing."""
    strength, (images, labels) = data.mixing.strength, pictures()

    def loss(rows) -> float:
        samples = ImageLoader(
            images, labels[rows], rows=rows, mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=4,
            device=precision.device, rank=exchange.rank, ranks=exchange.size, least=data.least,
        )  # fmt: skip
        return evaluate(model, samples.epoch(), precision, exchange=exchange).loss

    def gap() -> float:
        return 1 - loss(HELD_OUT - 1) / loss(HELD_OUT)

    release_epoch = strength.schedule_measurements(
        total_steps, data.steps_per_epoch, data.step_size
    )
    return MixingControl(strength, data.hold_out, gap, release_epoch, data.steps_per_epoch)


def facts_of(trainer, *, compiled=False, shapes_vary=False, recomputes=False, external_model=False):
    """What an engine is told of the trainer's run."""
    return RunFacts(
        device=trainer.steps.precision.device,
        compiled=compiled,
        shapes_vary=shapes_vary,
        scales_loss=trainer.steps.scaler.is_enabled(),
        processes=trainer.steps.exchange.size,
        accumulation=trainer.loader.accumulation,
        capturable=isinstance(trainer.steps.optimizer, CAPTURABLE),
        learns_mixing=isinstance(trainer.steps.meta, SampleMixup),
        unfreezes=trainer.freeze is not None and trainer.freeze.until is not None,
        recomputes=recomputes,
        external_model=external_model,
    )


def use_engine(trainer, cuda_graphs="on", *, deterministic=False) -> None:
    """Gives the trainer the engine that `make_trainer` would choose."""
    engine, notes = choose_engine(
        facts_of(trainer), cuda_graphs=cuda_graphs, deterministic=deterministic
    )
    for line in notes:
        trainer.log.console.say(line)
    trainer.steps = engine.steps(trainer.steps.parts, trainer.loader, trainer.log.console)


def use_graphs(trainer, recorder, asked=True, rate_dtype=torch.float64) -> None:
    """Gives the trainer CUDA graphs, which `recorder` captures; on a CPU."""
    trainer.steps = GraphedStep(
        trainer.steps.parts, trainer.loader, trainer.log.console, recorder, asked, rate_dtype
    )


def meta(strategy, mixing, exact=False, device=CPU, balance=None):
    """The object that learns how to mix; None without meta-mixup."""
    losses = mixed_cross_entropy if balance is None else balance.losses
    virtual = VirtualStep(
        strategy.skeleton, losses, exact=exact, exchange=strategy.exchange, tensors=strategy,
        weigh=balance and balance.sample_weights,
    )  # fmt: skip
    if mixing.meta_form == "policy":
        return PolicyMixup(MixupPolicy(3, 0.5, 0.1, 0.1, device), virtual)
    return SampleMixup(virtual, 0.1) if mixing.meta_form else None


def take_steps(gpu, trainer, steps=3, epoch=0):
    """Takes steps on a fake GPU (fake_cuda.py), as the trainer's loop does. In the first one, which
    sets up memory and states, the host may wait."""
    taken = steps_of(trainer, epoch)
    for step in range(steps):
        with gpu.watched() if step else contextlib.nullcontext():
            next(taken)
        gpu.steps += 1
    taken.close()


def steps_of(trainer, epoch: int):
    """The loop of the trainer without log lines; yields after each optimizer step of the epoch."""
    trainer.prepare(epoch)
    trainer.steps.start()
    trainer.times.mark("other")
    with contextlib.closing(trainer.loader.epoch(epoch)) as batches:
        for batch in batches:
            trainer.times.mark("data")
            trainer.forward_backward(batch)
            trainer.times.mark("forward_backward")
            if batch.ends_step:
                trainer.update()
                trainer.times.mark("optimizer")
                yield


def everything(trainer) -> dict:
    """All that must be equal to the bit between a resumed run and an uninterrupted one."""
    state = {f"model/{k}": v.clone() for k, v in trainer.steps.model.state_dict().items()}
    names = {p: n for n, p in trainer.steps.strategy.parameters.items()}
    for parameter, entries in trainer.steps.optimizer.state.items():
        for key, value in entries.items():
            state[f"optimizer/{names[parameter]}/{key}"] = torch.as_tensor(value).clone()
    for name, mean in trainer.steps.average.mean.items() if trainer.steps.average else ():
        state[f"average/{name}"] = mean.clone()
    learned = trainer.steps.meta.state_dict() if trainer.steps.meta else {}
    state |= {f"mixup/{name}": tensor.clone() for name, tensor in learned.items()}
    state |= {
        f"schedule/{k}": torch.tensor(v) for k, v in trainer.steps.schedule.state_dict().items()
    }
    state["random"] = torch.get_rng_state()
    state["scaler"] = torch.tensor(trainer.steps.scaler.get_scale())
    state["lr"] = torch.tensor(trainer.steps.learning_rate)
    return state


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def history(folder) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    of_the_clock = ("samples_per_second", "time_share", "peak_memory_bytes")
    return [{k: v for k, v in r.items() if k not in of_the_clock} for r in records]
