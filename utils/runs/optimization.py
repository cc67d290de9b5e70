"""Optimizer and schedule as the settings ask for them."""

import contextlib
from collections.abc import Callable

from ..checkpoints.checkpoint import Checkpoint
from ..errors import UserError
from ..exchange import Exchange
from ..models.parts import depths_of, heads_of
from ..optim.factory import build_optimizer
from ..optim.schedules import Schedule, build_schedule
from ..optim.table import OPTIMIZERS
from ..plural import counted
from ..settings.config import COMMAND_LINE, FILE
from ..settings.optimization import milestone_epochs
from ..training.objective import Precision

Say = Callable[[str], None]  # prints a line


def build_optimizer_of(
    settings,
    precision: Precision,
    model,
    lr: float,
    in_place_of=lambda parameter: parameter,
    exchange=None,
):
    """The optimizer that the settings ask for.

    Args:
        in_place_of: parameter of the model -> the tensor that the optimizer updates in its place.
        exchange: with the other ranks; None: the optimizer does not communicate.
    """
    entry = OPTIMIZERS[settings.optimizer]
    return build_optimizer(
        settings.optimizer,
        model,
        lr=lr,
        in_place_of=in_place_of,
        exchange=exchange,
        lr_scales=lr_scales(
            model,
            settings.layer_decay,
            settings.head_lr and settings.head_lr / settings.lr,
            in_place_of,
        ),
        exact=_trained_heads(model) if settings.head_lr else (),
        heads=_trained_heads(model) if entry.takes_heads else (),
        weight_decay=settings.weight_decay,
        decay_all=settings.decay_all,
        lookahead_k=settings.lookahead_k,
        lookahead_alpha=settings.lookahead_alpha,
        momentum=settings.momentum,
        **entry.values_of(settings),
        **entry.products(precision.name),
    )


def _trained_heads(model) -> list:
    """The parameters of the classifier that train; empty if it is unknown."""
    with contextlib.suppress(UserError):
        heads = [model.get_submodule(name) for name in heads_of(model)]
        return [p for head in heads for p in head.parameters() if p.requires_grad]
    return []


def note_optimizer(name: str, optimizer, exchange: Exchange, say: Say) -> None:
    """Says what computes the steps, for an optimizer whose name does not."""
    if remark := OPTIMIZERS[name].remark(optimizer.param_groups, exchange):
        say(f"note: {remark}")


def lr_scales(
    model,
    layer_decay: float | None = None,
    head_scale: float | None = None,
    in_place_of=lambda parameter: parameter,
) -> dict | None:
    """{tensor that the optimizer updates: the factor of its learning rate}; None: all are 1.

    Args:
        layer_decay: each block's learning rate is that of the block above it times this (Clark et
            al., "ELECTRA" (2020), arXiv:2003.10555); None: 1.
        head_scale: of the head; None: 1.
        in_place_of: see `build_optimizer_of`.
    """
    if layer_decay is None and head_scale is None:
        return None
    depths, decay = depths_of(model), layer_decay or 1.0
    top = max(depths.values())
    scales = {in_place_of(p): decay ** (top - depths[name]) for name, p in model.named_parameters()}
    if head_scale is not None:
        for head in heads_of(model):
            head = model.get_submodule(head)
            scales |= {in_place_of(p): head_scale for p in head.parameters()}
    return scales


def learning_rate(settings, global_batch: int, say: Say) -> float:
    """The peak learning rate: --lr, scaled to this global batch with --lr_base_size."""
    if settings.lr_base_size is None:
        return settings.lr
    lr = settings.lr * global_batch / settings.lr_base_size
    say(
        f"learning rate {lr:.4g}: --lr {settings.lr:g} is for {settings.lr_base_size} samples, and "
        f"an optimizer step has {global_batch}"
    )
    settings.refuse_low_peak(lr, f"this learning rate, {lr:.4g}")
    return lr


def note_rates_of_recipe(settings, origin: dict, say: Say) -> None:
    """Says so if the command line replaces a recipe's optimizer but keeps the recipe's
    learning rate, momentum or weight decay, which differ from the new optimizer's defaults."""
    defaults = settings.usual_rates()
    kept = [
        name
        for name, default in defaults.items()
        if origin[name] == FILE and default not in (None, getattr(settings, name))
    ]
    if origin["optimizer"] == COMMAND_LINE and kept:
        say(
            f"note: {', '.join(f'--{name} {getattr(settings, name):g}' for name in kept)} as the "
            f"recipe says; the default of --optimizer {settings.optimizer} is "
            f"{', '.join(f'{defaults[name]:g}' for name in kept)}"
        )


def schedule_maker(settings, lr: float, steps_per_epoch: int) -> Callable[[int], Schedule]:
    """(optimizer steps) -> the schedule over them."""

    def warmup_of(steps: int) -> int:
        if "warmup" not in settings.schedule_flags:  # a recipe's, that --sched onecycle overrules
            return 0
        if settings.warmup_steps is not None:
            warmup = settings.warmup_steps
        elif settings.warmup_ratio is not None:
            warmup = round(settings.warmup_ratio * steps)
        else:
            warmup = round(settings.warmup_epochs * steps_per_epoch)
        return min(warmup, steps // 5) if settings.time_budget is not None else warmup

    return lambda steps: build_schedule(
        settings.sched,
        lr=lr,
        total_steps=steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=warmup_of(steps),
        min_lr=settings.min_lr,
        gamma=settings.gamma,
        step_epochs=settings.step_epochs,
        milestones=milestone_epochs(settings.milestones),
        plateau_patience=settings.plateau_patience,
        per_epoch=settings.sched_per_epoch and settings.sched != "onecycle",
        warmup_lr=settings.warmup_lr,
    )


def schedule_of(
    settings,
    build: Callable[[int], Schedule],
    lr: float,
    schedule_steps: int,
    steps_per_epoch: int,
    checkpoint: Checkpoint | None,
    origin: dict,
    say: Say,
) -> Schedule:
    """The schedule over `schedule_steps` optimizer steps, of `build`. Says so if the learning rate
    of a resumed run departs from the schedule that it began with."""
    schedule = build(schedule_steps)
    if (warmup := schedule.warmup_steps) >= schedule_steps:
        say(f"note: the warm-up ({counted(warmup, 'step')}) takes the whole schedule")

    first = None
    if settings.sched == "step":
        first = settings.step_epochs
    elif settings.sched == "multistep" and settings.milestones is not None:
        first = milestone_epochs(settings.milestones)[0]
    if first is not None and first * steps_per_epoch >= schedule_steps:
        length = counted(float(f"{schedule_steps / steps_per_epoch:.3g}"), "epoch")
        say(
            f"note: the learning rate never falls: --sched {settings.sched} first lowers it after "
            f"{counted(float(first), 'epoch')}, and the schedule has {length}"
        )

    before = checkpoint and checkpoint.run_info.get("schedule_steps", schedule_steps)
    follows_length = settings.schedule_depends_on_length or settings.warmup_follows_length
    if before and before != schedule_steps and follows_length:
        step = checkpoint.step
        now, then = (lr * each.factor(step) for each in (schedule, build(before)))
        keep = f"; --epochs_for_sched {before // steps_per_epoch} keeps the old schedule"
        say(
            f"note: the {settings.sched} schedule spans {counted(schedule_steps, 'step')} now and "
            f"spanned {before:,}: the learning rate is now {now:.3g} instead of "
            f"{then:.3g}{keep if before % steps_per_epoch == 0 else ''}"
        )
    lowered = checkpoint.state.get("schedule", {}).get("reduced", 1.0) if checkpoint else 1.0
    if lowered < 1 and origin["lr"] == COMMAND_LINE:
        say(
            f"note: the plateau schedule has lowered the learning rate to {lowered:.3g} of --lr so "
            f"far: it is now {lr * lowered:.3g}"
        )
    return schedule
