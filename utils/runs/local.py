"""Local steps (`--strategy local`) as the settings ask for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..data.loader import Loader
from ..local.optimizer import OuterOptimizer
from ..local.rules import SyncRule, default_alpha
from ..optim.entry import LINEAR
from ..optim.schedules import RISE, Schedule
from ..optim.table import OPTIMIZERS
from ..plural import counted
from ..training.guard import Guard
from ..training.local.in_turn import loaders_of
from ..training.local.norm_statistics import NormStatistics
from ..training.local.steps import LocalSteps
from ..training.progress import Progress
from ..training.train_step import StepParts
from .prepare import Ready
from .run import Run


def build_local_steps(
    run: Run,
    ready: Ready,
    loader: Loader,
    rule: SyncRule,
    make_parts: Callable[[Guard, Progress], StepParts],
) -> LocalSteps:
    """The steps of this process's workers; prints a line.

    Args:
        loader: of the training split, for the first worker of this process.
        make_parts: makes the parts of a worker's TrainStep.
    """
    workers, settings = run.workers, run.settings
    statistics = None
    if settings.bn_batches:
        statistics = NormStatistics(
            ready.model,
            ready.make_objective(ready.model).logits,
            # Not those of `loaders_of`: they are read one at a time, so their `turns` is 1.
            [loader.of_rank(number) for number in workers.own],
            settings.bn_batches,
            workers,
            run.exchange,
        )
    make_outer = None
    if rule.name == "diloco":
        make_outer = functools.partial(
            OuterOptimizer, lr=settings.outer_lr, momentum=settings.outer_momentum
        )
    steps = LocalSteps(
        strategy=ready.strategy,
        make_parts=make_parts,
        workers=workers,
        loaders=loaders_of(loader, workers.own),
        exchange=run.exchange,
        rule=rule,
        progress=run.progress,
        seed=settings.seed,
        statistics=statistics,
        averages_state=settings.optimizer_average,
        make_outer=make_outer,
        say=run.console.say,
    )
    run.console.say(_description(steps, run.exchange.size))
    return steps


def rule_of(
    settings, schedule: Schedule, lr: float, total_steps: int, steps_per_epoch: int
) -> SyncRule:
    """When the workers average.

    Args:
        lr: the peak learning rate.
        steps_per_epoch: optimizer steps.
    """
    optimizer = OPTIMIZERS[settings.optimizer]
    adaptive = optimizer.lr_scaling(**optimizer.values_of(settings)) != LINEAR
    base, power = settings.base_of_rounds, settings.qsr_power
    alpha = settings.qsr_alpha or default_alpha(lr, base, adaptive=adaptive, power=power)
    warmup = schedule.warmup_steps
    if schedule.name == "onecycle":
        warmup = round(RISE * schedule.total_steps)
    switch = total_steps // 2
    if settings.sync_from is not None:
        switch = round(settings.sync_from * steps_per_epoch)
    return SyncRule(
        settings.sync_rule,
        total_steps,
        base=base,
        alpha=alpha,
        power=power,
        peak_lr=lr,
        warmup_steps=warmup,
        switch_step=switch,
        init=settings.sync_init,
    )


def _description(steps: LocalSteps, processes: int) -> str:
    rule, workers, outer = steps.rule, steps.workers.size, steps.averaging.outer
    when = {
        "qsr": f"alpha {rule.alpha:.4g}, H {rule.base} or more",
        "constant": f"H {rule.base}",
        "post_local": f"H 1, from step {rule.switch_step} on {rule.base}",
        "swap": f"H 1, from step {rule.switch_step} on all steps",
        "diloco": f"H {rule.base}",
    }[rule.name]
    where = f"{counted(workers, 'worker')} in {counted(processes, 'process')}"
    line = f"local steps: {where}, {rule.name} ({when})"
    if outer is not None:
        line += f", outer learning rate {outer.lr:g}, momentum {outer.momentum:g}"
    if workers == 1 and outer is None:
        line += "; one worker has nothing to average: --local_workers 4 trains four in turn"
    return line
