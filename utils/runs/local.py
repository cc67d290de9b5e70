"""Local steps (`--strategy local`) as the settings ask for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from utils.data.in_turn import InTurn
from utils.data.loader import Loader
from utils.local.outer import OuterOptimizer
from utils.local.rules import SyncRule, default_alpha, simulate
from utils.optim.entry import LINEAR
from utils.optim.schedules import RISE, Schedule
from utils.optim.table import OPTIMIZERS
from utils.plural import counted
from utils.runs.prepare import ReadyModel
from utils.runs.run import Run
from utils.training.guard import Guard
from utils.training.local_steps import LocalSteps
from utils.training.norm_statistics import NormStatistics
from utils.training.progress import Progress
from utils.training.rounds import averagings_text
from utils.training.train_step import StepParts
from utils.training.trainer import Trainer


def build_local_steps(
    run: Run,
    ready: ReadyModel,
    loader: Loader,
    rule: SyncRule,
    make_parts: Callable[[Guard, Progress], StepParts],
) -> tuple[LocalSteps, Loader | InTurn]:
    """The steps of this process's workers, and the loader of their batches; prints a line.

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
    return steps, InTurn(loader, workers.own) if len(workers.own) > 1 else loader


def rule_of(
    run: Run, schedule: Schedule, lr: float, total_steps: int, steps_per_epoch: int
) -> SyncRule:
    """When the workers average.

    Args:
        lr: the peak learning rate.
        steps_per_epoch: optimizer steps.
    """
    settings = run.settings
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


def forecast(trainer: Trainer) -> Iterator[str]:
    """Lines for --dry_run: averagings and bytes of the whole run."""
    steps, schedule = trainer.steps, trainer.steps.schedule
    assert isinstance(steps, LocalSteps)
    rule = steps.rule
    peak = steps.optimizer.param_groups[0]
    peak = peak["base_lr"] / peak.get("lr_scale", 1.0)
    rounds = simulate(rule, lambda step: peak * schedule.factor(step))
    trained = sum(p.nbytes for p in steps.strategy.parameters.values() if p.requires_grad)
    state = sum(t.nbytes for t in steps.averaging.averaged_state()[0].values())
    relative = 1 + state / trained  # what an averaging sends, relative to a step of DDP
    share = relative * rounds.ddp_share
    yield f"  local steps    {averagings_text(len(rounds), rule.total_steps, share)}"
    note = ""
    if schedule.name == "plateau":
        note = "; more where plateau lowers the learning rate" if rule.name == "qsr" else ""
    yield f"                 ({lengths_text(rounds.lengths)}{note})"
    if (size := steps.workers.size) > 1:
        # In an averaging, as in a step of DDP. The ends of a chain send less, the others more.
        sent = 2 * (size - 1) / size * trained
        yield (
            f"                 {size} processes with a worker each would each send, on average, "
            f"{_amount(sent * relative * len(rounds))}; with ddp {_amount(sent * rule.total_steps)}"
        )


def lengths_text(lengths: Sequence[int]) -> str:
    """ "H 4 to 30, the last round cut to 2"."""
    *others, last = lengths
    is_cut = bool(others) and last < min(others)  # the run ends before the round would
    whole = others if is_cut else lengths
    least, most = min(whole), max(whole)
    text = f"H {least:,}" if least == most else f"H {least:,} to {most:,}"
    return f"{text}, the last round cut to {last:,}" if is_cut else text


def _amount(count: float) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"
