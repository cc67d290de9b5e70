"""Builds the trainer from the settings, and prepares the run's folder."""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable

from utils.checkpoints.checkpoint import Checkpoint, Checkpoints
from utils.checkpoints.saver import Saver
from utils.distributed.strategies.base import Strategy
from utils.engines.choose import choose_engine
from utils.engines.engine import Engine, RunFacts
from utils.errors import UserError
from utils.exchange import Exchange
from utils.files import reason, replace_file
from utils.mixup.meta import PolicyMixup, SampleMixup, VirtualStep
from utils.mixup.policy import MixupPolicy
from utils.optim.factory import build_optimizer, is_capturable
from utils.optim.schedules import build_schedule
from utils.optim.table import OPTIMIZERS
from utils.reporting.metrics import MetricsLog, NoMetrics
from utils.reporting.trackers import TensorBoard, Wandb
from utils.runs.advice import launch_advice, memory_advice, phase_advice
from utils.runs.run import Run, same
from utils.settings.config import COMMAND_LINE, FILE, to_yaml
from utils.settings.optimization import milestone_epochs
from utils.settings.run import save_interval
from utils.training.average import Average
from utils.training.evaluation import Evaluation
from utils.training.freeze import Freeze
from utils.training.guard import Guard
from utils.training.objective import mixed_cross_entropy
from utils.training.trainer import Trainer
from utils.weights.card import ModelCard, TextCard


def build_trainer(
    run: Run,
    *,
    model,
    freeze: Freeze | None,
    build_objective: Callable[[Engine], Callable],
    loader,
    measure: Callable[..., Evaluation | None],
    eval_split: str,
    card: ModelCard | TextCard,
    fingerprint: str,
    checkpoint: Checkpoint | None,
) -> Trainer | None:
    """A Trainer as the settings ask for, restored from `checkpoint`.

    Args:
        model: on its device, with its initial weights, wrapped by `run.strategy`.
        freeze: which part of it trains in which epoch.
        build_objective: (engine) -> the objective, for which the engine wraps the model.
        loader: of the training split.
        measure: () -> Evaluation on the split `eval_split`, "val" or "test".
        card: what it takes to use the model; stored in every checkpoint.
        fingerprint: of the data; likewise.

    Returns None, and prints a line, if the run is finished already.
    """
    settings, folder, strategy = run.settings, run.folder, run.strategy
    if eval_split != "val":
        for flag in _needs_validation(settings):
            raise UserError(
                f"{flag} needs a validation split, the test set decides nothing: give "
                "--val_fraction 0.1 (say)"
            )
    if checkpoint is None:
        _say_foreign_rates(run)
    total_steps, limit = settings.epochs * loader.steps_per_epoch, "--epochs"
    if settings.max_steps is not None and settings.max_steps < total_steps:
        total_steps, limit = settings.max_steps, "--max_steps"
    if checkpoint is not None and _is_finished(run, checkpoint, total_steps, limit):
        return None
    span = total_steps
    if settings.epochs_for_sched is not None:
        span = settings.epochs_for_sched * loader.steps_per_epoch
    lr = _learning_rate(run, loader.step_size)
    schedule = _schedule(run, lr, span, loader.steps_per_epoch, checkpoint)
    guard = Guard(model, strategy)
    with run.signals.held():  # imports PyTorch's compiler, where C++ calls Python
        optimizer = build_optimizer_of(run, model, lr, strategy.own, strategy.optimizer_exchange)
    engine, refusals = choose_engine(
        run_facts(run, loader, freeze, texts=isinstance(card, TextCard)),
        cuda_graphs=settings.cuda_graphs,
        deterministic=settings.deterministic,
    )
    objective = build_objective(engine)
    metrics = _open_metrics(run, checkpoint, card)
    save_steps, save_seconds = save_interval(settings.save_every)
    store = Checkpoints(folder.checkpoints, keep=settings.checkpoint_hist, warn=run.console.say)
    trainer = Trainer(
        model=model,
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        precision=run.precision,
        total_steps=total_steps,
        evaluate=measure,
        eval_split=eval_split,
        eval_every=settings.eval_every,
        console=run.console,
        metrics=metrics,
        saver=Saver(store, metrics, run.console, save_steps, save_seconds, run.another_exchange()),
        signals=run.signals,
        guard=guard,
        clip=settings.clip,
        on_nonfinite=settings.on_nonfinite,
        log_every=settings.log_every,
        average=None
        if settings.ema_decay is None
        else Average(model, settings.ema_decay, strategy),
        freeze=freeze,
        early_stop_patience=settings.early_stop_patience,
        advice=phase_advice(settings, run, loader)
        | memory_advice(settings, run.device)
        | launch_advice(settings),
        meta=build_meta(run, len(card.classes), strategy, run.exchange),
        saved_settings={
            "entry": settings.entry,
            "data": card.to_dict(),
            "data_fingerprint": fingerprint,
            "schedule_steps": span,
            "threads": run.threads,
            "global_batch_size": loader.step_size,
            "micro_batches": run.micro_batches or settings.accumulation_steps * run.exchange.size,
            **run.engine(),
        },
        strategy=strategy,
        stopping=run.stopping,
        free_cores=run.free_cores,
    )
    trainer.started = run.started
    run.trainer = trainer
    if checkpoint is not None:
        trainer.restore(checkpoint)
    for line in refusals:
        run.console.say(line)
    engine.take_steps(trainer)
    return trainer


def run_facts(run: Run, loader, freeze: Freeze | None, texts: bool) -> RunFacts:
    """The facts that decide which engine serves the run."""
    return RunFacts(
        device=run.device,
        compiled=run.settings.compile,
        texts=texts,
        scales_loss=run.precision.scales_loss,
        processes=run.exchange.size,
        accumulation=loader.accumulation,
        capturable=is_capturable(run.settings.optimizer, run.settings.lookahead_k),
        learns_mixing=run.settings.mixup == "meta",
        unfreezes=freeze is not None and freeze.until is not None,
    )


def build_optimizer_of(run: Run, model, lr: float, own=lambda parameter: parameter, exchange=None):
    """The optimizer that the settings ask for.

    Args:
        own: what is stepped in place of a parameter of the model.
        exchange: with the other ranks; None: it asks none.
    """
    settings = run.settings
    entry = OPTIMIZERS[settings.optimizer]
    return build_optimizer(
        settings.optimizer,
        model,
        lr=lr,
        in_place_of=own,
        exchange=exchange,
        weight_decay=settings.weight_decay,
        decay_all=settings.decay_all,
        lookahead_k=settings.lookahead_k,
        lookahead_alpha=settings.lookahead_alpha,
        momentum=settings.momentum,
        **entry.values_of(settings),
        **entry.products(run.precision.name),
    )


def _learning_rate(run: Run, global_batch: int) -> float:
    """The peak learning rate: --lr, scaled to this global batch with --lr_base_size."""
    settings = run.settings
    if settings.lr_base_size is None:
        return settings.lr
    lr = settings.lr * global_batch / settings.lr_base_size
    run.console.say(
        f"learning rate {lr:.4g}: --lr {settings.lr:g} is for {settings.lr_base_size} samples, and "
        f"an optimizer step has {global_batch}"
    )
    return lr


def _say_foreign_rates(run: Run) -> None:
    """Prints a note if an optimizer from the command line uses the recipe's rates for another
    one."""
    settings, origin = run.settings, run.origin
    entry = OPTIMIZERS[settings.optimizer]
    own = entry.defaults(**entry.values_of(settings))
    foreign = [n for n in own if origin[n] == FILE and own[n] not in (None, getattr(settings, n))]
    if origin["optimizer"] == COMMAND_LINE and foreign:
        run.console.say(
            f"note: {', '.join(f'--{n} {getattr(settings, n):g}' for n in foreign)} as the recipe "
            f"says; the default of --optimizer {settings.optimizer} is "
            f"{', '.join(f'{own[n]:g}' for n in foreign)}"
        )


def build_meta(
    run: Run, classes: int, strategy: Strategy, exchange: Exchange | None = None
) -> PolicyMixup | SampleMixup | None:
    """With --mixup meta, the object that learns how to mix.

    Args:
        strategy: holds the model's tensors.
        exchange: with the other ranks; None: no communication.
    """
    settings = run.settings
    if settings.mixup != "meta":
        return None
    losses = functools.partial(mixed_cross_entropy, label_smoothing=settings.label_smoothing)
    # In fp16 small gradients would be lost without a loss scaler: the virtual step is then in fp32.
    half = run.precision.name == "bf16"
    autocast = run.precision.autocast if half else contextlib.nullcontext
    virtual = VirtualStep(
        strategy.skeleton, losses, autocast, settings.meta_exact, exchange, strategy
    )
    if settings.meta_form == "sample":
        return SampleMixup(virtual, settings.meta_lr)
    policy = MixupPolicy(classes, settings.alpha, settings.meta_lr, settings.meta_decay, run.device)
    return PolicyMixup(policy, virtual)


def _needs_validation(settings) -> list[str]:
    flags = ["--early_stop_patience"] if settings.early_stop_patience is not None else []
    flags += [] if settings.final_test else ["--no_final_test"]
    return flags + (["--sched plateau"] if settings.sched == "plateau" else [])


def _schedule(run: Run, lr: float, span: int, steps_per_epoch: int, checkpoint: Checkpoint | None):
    """The schedule over `span` optimizer steps; notes if a resumed run departs from its old
    plan."""
    settings = run.settings
    warmup_steps = settings.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(settings.warmup_epochs * steps_per_epoch)
    if warmup_steps >= span:
        run.console.say(f"note: the warm-up ({warmup_steps} steps) takes the whole schedule")

    def build(steps: int):
        return build_schedule(
            settings.sched,
            lr=lr,
            total_steps=steps,
            steps_per_epoch=steps_per_epoch,
            warmup_steps=warmup_steps,
            min_lr=settings.min_lr,
            gamma=settings.gamma,
            step_epochs=settings.step_epochs,
            milestones=milestone_epochs(settings.milestones),
            plateau_patience=settings.plateau_patience,
        )

    schedule = build(span)
    before = checkpoint and checkpoint.state["settings"].get("schedule_steps", span)
    if before and before != span and settings.schedule_has_span:
        step = checkpoint.step
        now, then = (lr * plan.factor(step) for plan in (schedule, build(before)))
        keep = f"; --epochs_for_sched {before // steps_per_epoch} keeps the old plan"
        run.console.say(
            f"note: the {settings.sched} schedule spans {span} steps now and spanned {before}: the "
            f"learning rate goes on with {now:.3g}, where the old plan has {then:.3g}"
            f"{keep if before % steps_per_epoch == 0 else ''}"
        )
    return schedule


def _open_metrics(
    run: Run, checkpoint: Checkpoint | None, card: ModelCard | TextCard
) -> MetricsLog | NoMetrics:
    """Writes the run's settings, and opens its metrics and trackers."""
    settings, folder = run.settings, run.folder
    source = run.resumed_folder()
    if not run.leads:
        return NoMetrics()
    try:
        if checkpoint is not None and not same(source, folder.path):
            # A branch gets the checkpoints that it starts from before it counts as a run.
            store = Checkpoints(folder.checkpoints)
            for step in {checkpoint.step, checkpoint.state["progress"]["best_step"]} - {None}:
                store.adopt(source / "checkpoints", step)
            if (source / "metrics.jsonl").exists():
                shutil.copyfile(source / "metrics.jsonl", folder.metrics)
        trackers = [] if settings.dry_run else _trackers(run, checkpoint)
        metrics = MetricsLog(folder.metrics, warn=run.console.say, trackers=trackers)
        run.closing(metrics)
        if checkpoint is None:
            metrics.cut(0)
        else:
            metrics.cut(checkpoint.state["metrics_bytes"], checkpoint.step)
        if isinstance(card, TextCard):
            replace_file(folder.tokenizer, card.tokenizer.encode())
        text = f"# {settings.entry}\n{to_yaml(settings, run.origin)}"
        replace_file(folder.config, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise UserError(f"--output {folder.path}: {reason(error)}") from None
    return metrics


def _trackers(run: Run, checkpoint: Checkpoint | None) -> list:
    settings, folder = run.settings, run.folder
    # The records of the checkpoint's own step are logged again (see MetricsLog.cut).
    purge_step = checkpoint.step if checkpoint else None
    trackers = [TensorBoard(folder.tensorboard, purge_step=purge_step, warn=run.console.say)]
    if settings.wandb != "disabled":
        tags = [tag.strip() for tag in (settings.wandb_tags or "").split(",") if tag.strip()]
        trackers.append(
            Wandb(
                mode=settings.wandb,
                project=settings.wandb_project,
                name=folder.path.name,
                tags=tags,
                folder=folder.path,
                settings=vars(settings),
                warn=run.console.say,
            )
        )
    return trackers


def _is_finished(run: Run, checkpoint: Checkpoint, total_steps: int, limit: str) -> bool:
    """Whether the resumed run has nothing left to do; prints a line if so."""
    step, path = checkpoint.step, run.folder.path
    if step > total_steps:
        raise UserError(
            f"the run in {run.settings.resume} has done {step} steps and {limit} asks for "
            f"{total_steps}: give more, or start a new run with --output"
        )
    try:
        summary = json.loads(run.folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    patience, since = run.settings.early_stop_patience, checkpoint.state["progress"]["since_best"]
    stopped_early = patience is not None and since >= patience
    if summary.get("status") not in ("finished", "stopped_early"):
        return False
    if step < total_steps and not stopped_early:
        return False
    how, more = ("has stopped early", "--early_stop_patience") if step < total_steps else (
        "is finished", limit
    )  # fmt: skip
    report = f"; --resume {path} --eval_only --report makes its report"
    accuracy = summary["test_accuracy"]
    result = "not tested" if accuracy is None else f"test accuracy {accuracy:.2f} %"
    run.console.say(
        f"this run {how}: {summary['epochs']:g} epochs, {result} in {path}; a larger {more} goes "
        f"on with it"
        f"{report if run.settings.report else ''}"
    )
    return True
