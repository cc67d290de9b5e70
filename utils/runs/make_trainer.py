"""Makes the plan and the trainer from the settings, and opens the run's records."""

from collections.abc import Callable

import torch

from ..checkpoints.checkpoint import Checkpoint, Checkpoints
from ..checkpoints.saver import Saver
from ..engines.engine import Engine, RunFacts, choose_engine
from ..errors import UserError, one_line
from ..machine.nvml import open_gpu
from ..measures.compute import wilson_interval
from ..measures.table import OF_SKLEARN
from ..optim.factory import is_capturable
from ..optim.schedules import Schedule
from ..plural import counted
from ..settings.images import size_schedule
from ..settings.run import save_interval
from ..tasks.mixing import build_meta, build_mixing_control, learns_pairs
from ..tasks.task import Task
from ..training.average import Average
from ..training.evaluation import evaluate
from ..training.flops import peak_of
from ..training.guard import Guard
from ..training.hardware import Hardware
from ..training.log import TrainingLog
from ..training.objective import Precision
from ..training.progress import Progress
from ..training.progressive_resizing import ProgressiveResizing, resized
from ..training.steps import Steps
from ..training.time_budget import Timing
from ..training.times import Clock
from ..training.train_step import StepParts
from ..training.trainer import Trainer, TrainingPlan
from ..user_files import contents
from .advice import memory_advice, phase_advice
from .local import build_local_steps, rule_of
from .optimization import (
    build_optimizer_of,
    learning_rate,
    note_optimizer,
    note_rates_of_recipe,
    schedule_maker,
    schedule_of,
)
from .prepare import Ready, forward, measure_split
from .records import open_metrics
from .run import Run
from .time_budget import evaluation_seconds, longest, rehearse_report, time_budget_of, time_plans

# Width of the 95 % interval of an accuracy of 80 % from which a validation split is called small.
WIDE_INTERVAL = 10  # points


def make_plan(run: Run, ready: Ready, checkpoint: Checkpoint | None) -> TrainingPlan:
    """How long the run trains, and what it does when; notes what is never reached, and rates that a
    recipe keeps. UserError: a flag needs a validation split."""
    settings, task = run.settings, ready.task
    steps_per_epoch = task.train.steps_per_epoch
    if settings.steps_per_epoch not in (None, steps_per_epoch):
        raise UserError(
            f"--steps_per_epoch {settings.steps_per_epoch}: the data make {steps_per_epoch}; leave "
            "the flag out, or change the batch or --drop_last"
        )
    if task.val is None and (flags := _needs_validation(settings)):
        val_is_test = getattr(task.data, "val_is_test", False)
        other = ", or --val_is_validation, which uses val/ as that split" if val_is_test else ""
        raise UserError(
            f"{flags[0]} needs a validation split, because the test set is never used for a "
            f"choice: add --val_fraction 0.1, for example{other}"
        )
    if checkpoint is None:
        _note_small_validation(settings, task, run.console.say)
        note_rates_of_recipe(settings, run.origin, run.console.say)
    total_steps, limit = longest(run, steps_per_epoch)
    for name in ("unfreeze_epoch", "mixup_off_epoch"):  # those beyond --epochs are refused
        epoch = getattr(settings, name)
        if epoch and epoch * steps_per_epoch >= total_steps:
            counted_steps = counted(total_steps, "step")
            run.console.say(f"note: --{name} {epoch} is not reached in {counted_steps}")
    by = None if settings.best_by is None else ready.measures.measure(settings.best_by)
    if settings.best_by in OF_SKLEARN and len(task.val.labels.unique()) < 2:
        raise UserError(
            f"--best_by {settings.best_by} is undefined on the validation split, which has one "
            "class alone: take --best_by accuracy"
        )
    most_steps, eval_every = total_steps, settings.eval_every
    if plans := time_plans(settings, checkpoint):
        _, total_steps, eval_every = plans[-1]
    elif settings.time_budget is not None:  # there are no evaluations before there is a plan
        eval_every *= total_steps
    return TrainingPlan(
        total_steps,
        limit,
        most_steps=most_steps,
        eval_split="val" if task.val else "test",
        eval_every=eval_every,
        eval_on_start=settings.eval_on_start,
        resizing=_progressive_resizing(run, ready, total_steps / steps_per_epoch),
        log_every=settings.log_every,
        early_stop_patience=settings.early_stop_patience,
        best_by=by,
        on_nonfinite=settings.on_nonfinite,
    )


def _progressive_resizing(run: Run, ready: Ready, epochs: float) -> ProgressiveResizing | None:
    """As --image_size_schedule says, for a run of `epochs`. UserError: the model does not take
    pictures of that size. Collective."""
    if (text := run.settings.image_size_schedule) is None:
        return None
    size, fraction = size_schedule(text)
    sample = ready.task.usual_sample()
    if size >= (usual := min(sample.shape[2:])):
        raise UserError(f"--image_size_schedule {text}: the pictures have {usual} pixels already")
    try:
        forward(ready.model, resized(sample, size), run.precision)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--image_size_schedule {text}: {run.model_name} takes no pictures of {size} pixels "
            f"({one_line(error, 200)}); leave the flag out, or take another size"
        ) from error
    small = int(fraction * epochs + 1e-9)  # whole epochs; 1e-9: 0.29 of 100 are 29
    run.console.say(f"pictures of {size} pixels in {small} of {epochs:g} epochs, then of {usual}")
    return ProgressiveResizing(size, small)


def _note_small_validation(settings, task: Task, say: Callable[[str], None]) -> None:
    """Says so if what the validation split chooses is largely chance."""
    if task.val is None:
        return
    advice = "; a larger --val_fraction chooses better" if settings.val_fraction else ""
    samples = task.val.samples
    low, high = wilson_interval(0.8 * samples, samples)
    if high - low > WIDE_INTERVAL:
        say(
            f"note: the validation split has {counted(samples, 'sample')}, on which an accuracy of "
            f"80 % means {low:.0f} to {high:.0f} % (95 % interval), so that chance "
            f"chooses among similar weights{advice}"
        )


def make_trainer(
    run: Run, ready: Ready, plan: TrainingPlan, checkpoint: Checkpoint | None
) -> Trainer:
    """A Trainer as the settings ask for, restored from `checkpoint`. It evaluates the validation
    split, or the test set if there is no such split."""
    settings, task, total_steps = run.settings, ready.task, plan.total_steps
    loader, evaluated = task.train, task.val or task.test
    schedule_steps = total_steps
    plans = time_plans(settings, checkpoint)
    if plans:
        schedule_steps = plans[0].total_steps
    elif settings.epochs_for_sched is not None and settings.time_budget is None:
        schedule_steps = settings.epochs_for_sched * loader.steps_per_epoch
    engine, notes = choose_engine(
        run_facts(settings, run.precision, run.exchange.size, ready),
        engine=settings.engine,
        cuda_graphs="off" if settings.trains_locally else settings.cuda_graphs,
        deterministic=settings.deterministic,
    )
    lr = learning_rate(settings, loader.step_size, run.console.say)
    plan_schedule = schedule_maker(settings, lr, loader.steps_per_epoch)
    schedule = schedule_of(
        settings,
        plan_schedule,
        lr,
        schedule_steps,
        loader.steps_per_epoch,
        checkpoint,
        run.origin,
        run.console.say,
    )
    schedule.corrections += [(one.step, one.total_steps) for one in plans[1:]]
    make_parts = _parts_maker(run, ready, checkpoint, schedule, lr, engine)
    steps: Steps
    if settings.trains_locally:
        rule = rule_of(settings, schedule, lr, total_steps, loader.steps_per_epoch)
        steps = build_local_steps(run, ready, loader, rule, make_parts)
    else:
        parts = make_parts(Guard(ready.model, ready.strategy), run.progress)
        steps = engine.steps(parts, loader, run.console)
    exchange = ready.strategy.optimizer_exchange
    note_optimizer(settings.optimizer, steps.optimizer, exchange, run.console.say)
    metrics = open_metrics(run, checkpoint, task.card)
    gpus = run.exchange.size if run.device.type == "cuda" else 0
    flops = ready.flops if plan.resizing is None else None  # a sample takes fewer at first
    clock = Clock(run.progress, run.device, run.started, gpus)
    log = TrainingLog(
        run.console,
        metrics,
        phase_advice(settings, run.precision, loader) | memory_advice(settings, run.device),
        run.close_at_end(_hardware(run.precision, run.leads, flops, clock)),
    )
    timing = None
    if settings.time_budget is not None:
        timing = Timing(
            time_budget_of(run, task, plan, clock, checkpoint),
            plan_schedule,
            lambda: evaluation_seconds(run, ready, evaluated),
            lambda: rehearse_report(run, metrics, ready),
        )
    save_steps, save_seconds = save_interval(settings.save_every, loader.steps_per_epoch)
    store = Checkpoints(run.folder.checkpoints, keep=settings.checkpoint_hist, warn=run.console.say)
    trainer = Trainer(
        steps=steps,
        loader=loader,
        plan=plan,
        evaluate=lambda is_last: measure_split(run, ready, evaluated, records=is_last),
        log=log,
        saver=Saver(
            store,
            metrics,
            run.console,
            save_steps,
            save_seconds,
            run.another_exchange(),
            _run_info(run, ready, None if settings.time_budget else schedule_steps),
        ),
        agreed_signal=run.agreed_signal,
        freeze=ready.freeze,
        mixing_control=build_mixing_control(
            task,
            lambda samples: (
                evaluate(ready.model, samples.epoch(), run.precision, exchange=run.exchange).loss
            ),
            ready.strategy.make_equal,
            total_steps,
            settings.mixup_off_epoch or None,
            run.console.say if checkpoint is None else None,
        ),
        clock=clock,
        timing=timing,
        enter=run.watch.enter if run.watch is not None else None,
    )
    if checkpoint is not None:
        trainer.restore(checkpoint)
        if settings.time_budget is None:
            trainer.progress.time_plan = None  # it is not followed any more
    for line in notes:
        run.console.say(line)
    return trainer


def _hardware(precision: Precision, leads: bool, flops: int | None, clock: Clock) -> Hardware:
    """What tells how well the GPUs are used; of nothing on a CPU, and in all processes but the one
    that leads, as the others do not write.

    Args:
        flops: of a sample's forward pass; None: unknown.
    """
    if precision.device.type != "cuda" or not leads:
        return Hardware()
    properties = torch.cuda.get_device_properties(precision.device)
    gpu = open_gpu(str(properties.uuid))
    return Hardware(
        None if gpu is None else gpu.read,
        gpus=clock.gpus,
        gpu_seconds=lambda: clock.gpu_seconds,
        flops=flops,
        peak=peak_of(properties.name, precision.name),
    )


def _parts_maker(
    run: Run,
    ready: Ready,
    checkpoint: Checkpoint | None,
    schedule: Schedule,
    lr: float,
    engine: Engine,
) -> Callable[[Guard, Progress], StepParts]:
    """A function that makes the parts of a TrainStep, on the model as `engine` wraps it; with local
    steps those of each worker."""
    settings, task, strategy = run.settings, ready.task, ready.strategy
    classes = len(task.card.classes)
    # How long a run with --time_budget will be is not known yet.
    steps = schedule.total_steps if settings.time_budget is None else 0
    for_pairs = learns_pairs(settings, task, steps)
    learns_policy = settings.mixup == "meta" and settings.meta_form == "policy"
    if learns_policy and not for_pairs and checkpoint is None:
        run.console.say(
            f"--mixup meta learns one distribution for all pairs of the {classes} classes: to "
            "learn one for each pair, train longer, and with --meta_decay 0, which forgets nothing"
        )
    # --compile imports PyTorch's compiler, in which C++ calls Python: an exception there would
    # abort the process.
    with run.signals.held():
        called = engine.wrap(strategy, run.console)
    objective = ready.make_objective(called)

    def make_parts(guard: Guard, progress: Progress) -> StepParts:
        with run.signals.held():  # an optimizer may import it, too
            optimizer = build_optimizer_of(
                settings,
                run.precision,
                ready.model,
                lr,
                strategy.optimized_tensor,
                strategy.optimizer_exchange,
            )
        average = None
        if settings.ema_decay is not None:
            average = Average(ready.model, settings.ema_decay, strategy)
        return StepParts(
            strategy=strategy,
            objective=objective,
            optimizer=optimizer,
            schedule=schedule,
            precision=run.precision,
            progress=progress,
            guard=guard,
            clip=settings.clip or None,
            average=average,
            meta=build_meta(
                settings, classes, strategy, run.precision, run.exchange, for_pairs, ready.balance
            ),
        )

    return make_parts


def _run_info(run: Run, ready: Ready, schedule_steps: int | None) -> dict:
    """`Checkpoint.run_info` of every checkpoint; the settings themselves are in config.yaml."""
    settings, task = run.settings, ready.task
    return {
        "entry": settings.entry,
        "data": task.card.to_dict(),
        "data_fingerprint": task.data.fingerprint,
        **({} if schedule_steps is None else {"schedule_steps": schedule_steps}),
        "threads": run.threads,
        "global_batch_size": task.train.step_size,
        "micro_batches": run.micro_batches or settings.accumulation_steps * run.workers.size,
        **(ready.balance.run_info if ready.balance else {}),
        "own_files": contents(vars(settings)),
        **run.numerical_environment(),
    }


def run_facts(settings, precision: Precision, processes: int, ready: Ready) -> RunFacts:
    """The facts that decide which engine serves the run."""
    backbone = getattr(ready.model, "backbone", ready.model)
    return RunFacts(
        device=precision.device,
        compiled=settings.compile,
        shapes_vary=bool(settings.batch_tokens or settings.image_size_schedule),
        scales_loss=precision.scales_loss,
        processes=processes,
        accumulation=ready.task.train.accumulation,
        capturable=is_capturable(settings.optimizer, settings.lookahead_k),
        learns_mixing=settings.mixup == "meta" and settings.meta_form == "sample",
        unfreezes=ready.freeze is not None and ready.freeze.until is not None,
        recomputes=settings.grad_checkpointing,
        external_model=not type(backbone).__module__.startswith("utils."),
    )


def _needs_validation(settings) -> list[str]:
    flags = ["--early_stop_patience"] if settings.early_stop_patience is not None else []
    flags += [] if settings.final_test else ["--no_final_test"]
    flags += ["--use best"] if settings.use == "best" else []
    flags += [f"--best_by {settings.best_by}"] if settings.best_by is not None else []
    return flags + (["--sched plateau"] if settings.sched == "plateau" else [])
