"""Makes ready what is trained or measured: data, loaders and model, alike for both."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpoints.checkpoint import Checkpoint
from ..data.loader import Loader
from ..distributed.strategies.base import Strategy, build_strategy
from ..distributed.sync_batch_norm import alone, sync_batch_norms
from ..errors import UserError
from ..fused import fuse, kernels
from ..measures.measures import Measures, usual_measures
from ..measures.outcomes import Outcomes
from ..measures.table import names_in
from ..models.parts import heads_of
from ..models.whiten import WhitenedStem
from ..settings.transfer import is_published
from ..tasks.kinds import Kind
from ..tasks.task import Task
from ..training.class_balance import ClassBalance
from ..training.controls import Freeze
from ..training.evaluation import Evaluation, evaluate
from ..training.flops import forward_flops
from ..training.keep_fp32 import keep_in_float32, names_of_modules, refuse_uncalled
from ..training.objective import Classification, Precision
from ..weights.pretrained import fit_weights, load_pretrained
from .auto_batch import choose_micro_batch
from .class_balance import class_balance
from .frozen_features import with_features
from .resume import check_data
from .run import Run


@dataclass(frozen=True)
class Ready:
    """What can be trained or measured.

    Attributes:
        task: the data, with their loaders.
        model: on its device, with its canonical names.
        strategy: how the model is spread over processes.
        make_objective: takes the callable that computes the logits, such as
            `strategy.called`; returns the objective.
        measures: what is measured beside the loss.
        freeze: which part of it trains in which epoch; None: all of it.
        flops: operations of a forward pass over a sample of usual size; None: not counted, as on a
            CPU.
        balance: the training loss; None: plain cross-entropy.
    """

    task: Task
    model: nn.Module
    strategy: Strategy
    make_objective: Callable[[Callable], Classification]
    measures: Measures
    freeze: Freeze | None
    flops: int | None = None
    balance: ClassBalance | None = None


def prepare(run: Run, kind: Kind, checkpoint: Checkpoint | None) -> Ready:
    """Loads the data, and gives the model its weights, device, fused modules and strategy. With
    --auto_batch the loaders get the micro-batch that fits.

    Args:
        checkpoint: of the resumed run, whose weights the model does not have yet; None: the
            settings say from which weights it starts.
    """
    settings, say, pretrained = run.settings, run.console.say, None
    if settings.pretrained and checkpoint is None:
        if is_published(settings.pretrained):
            pretrained = kind.load_published(say)
        else:  # `use` is, in training, of this run
            use = None if settings.action.trains else settings.use
            pretrained = load_pretrained(settings.pretrained, say, use)
        kind.check_pretrained(pretrained)
        say(f"weights from {pretrained.source_text}")
    task = kind.load_task(run, checkpoint and kind.card(checkpoint), pretrained)
    trained_on = None if settings.eval_data else checkpoint
    check_data(run, trained_on, task.data.fingerprint, kind.data_flags)
    # On the CPU; if it has `mixes_inside = True`, its forward takes the mixing plan as second
    # argument.
    model = kind.build_model(task.card)
    flops = None
    if run.device.type == "cuda" and settings.action.trains and run.leads:
        flops = forward_flops(model, task.usual_sample())
    if pretrained is not None:
        fit_weights(model, pretrained, say, not settings.action.trains, task.card.classes)
    elif checkpoint is None:
        for stem in (each for each in model.modules() if isinstance(each, WhitenedStem)):
            stem.fit(task.usual_pictures())
    model.to(run.device)
    freeze = None
    if settings.freeze_backbone:
        freeze = Freeze(model, heads_of(model), settings.unfreeze_epoch)
        if settings.unfreeze_epoch is None:
            # Now, so that optimizer and strategy leave out what never trains.
            freeze.apply(0)
    if settings.sync_bn:
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise UserError(f"--sync_bn: {run.model_name} has no BatchNorm; leave it out")
        sync_batch_norms(model, run.exchange)
    try:
        fuse(model, settings.fused)
    except ValueError as error:
        raise UserError(f"--fused {settings.fused}: {error}; leave it out") from None
    _say_fused(settings, run.device, say)
    kept = kept_modules(model, settings.keep_fp32, run.precision, say)
    if kept:
        refuse_uncalled(model, kept, lambda: forward(model, task.usual_sample(), run.precision))
        keep_in_float32(model, kept, run.device)
    mixes_inside = getattr(model, "mixes_inside", False)
    balance = class_balance(run, task, checkpoint) if settings.action.trains else None

    def make_objective(called: Callable) -> Classification:
        return Classification(
            called,
            run.precision,
            settings.label_smoothing,
            counts_mixing=settings.mixing_name != "none",
            clean_accuracy=settings.log_clean_accuracy,
            mixes_inside=mixes_inside,
            fused=settings.fused != "none",
            balance=balance,
        )

    if settings.auto_batch and settings.resume is None:  # a resumed run keeps what was found
        with alone(model):
            choose_micro_batch(run, model, make_objective(model), freeze, task)
    if freeze is not None and freeze.until is None and settings.action.trains:
        task = with_features(run, task, model, checkpoint)
        freeze.apply(0)
        flops = flops if task.train.features is None else None
    unfreezes = settings.unfreeze_epoch is not None
    strategy = build_strategy(settings.strategy, model, run.exchange, unfreezes)
    # All ranks have used the same seed so far, so their weights are equal; from here on each draws
    # its own dropout.
    if run.workers.own[0] > 0:
        torch.manual_seed(settings.seed + run.workers.own[0])
    return Ready(
        task, model, strategy, make_objective, _measures(run, task), freeze, flops, balance
    )


def measure_split(
    run: Run,
    ready: Ready,
    loader: Loader,
    views: str = "none",
    records: bool = False,
) -> Evaluation | None:
    """Evaluates the model on the split of `loader`; see `evaluate`. None when a signal has come.
    `records` the answer to each sample."""
    outcomes = None
    if records:
        visited = [loader.of_rank(rank).visited() for rank in range(run.exchange.size)]
        outcomes = Outcomes(len(ready.task.card.classes), visited, run.exchange)
    return evaluate(
        ready.model,
        loader.epoch(),
        run.precision,
        run.interrupted,
        measures=ready.measures,
        exchange=run.exchange,
        views=views,
        outcomes=outcomes,
    )


def _measures(run: Run, task: Task) -> Measures:
    """What is usual for these classes, what --metrics asks for, and what --best_by follows."""
    settings, classes = run.settings, len(task.card.classes)
    names = usual_measures(task.train.labels.cpu().numpy(), classes) + names_in(settings.metrics)
    if settings.best_by is not None:
        names.append(settings.best_by)
    return Measures(classes, dict.fromkeys(names))


def kept_modules(
    model: nn.Module, patterns: str | None, precision: Precision, say: Callable[[str], None]
) -> list[str]:
    """Names of the modules that --keep_fp32 keeps in float32.

    Args:
        patterns: as given to the flag, with commas; None: not given.

    Raises:
        UserError: the model has no such module.
    """
    names = [] if patterns is None else names_of_modules(model, patterns.split(","))
    if names and precision.name == "fp32":
        say("note: --keep_fp32 has no effect: everything is computed in float32")
        return []
    return names


def forward(model: nn.Module, sample, precision: Precision) -> None:
    """One sample, without gradients, in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad(), precision.autocast():
        model(sample.to(precision.device))
    for module in training:
        module.training = True


def _say_fused(settings, device: torch.device, say: Callable[[str], None]) -> None:
    fused = settings.fused
    if fused != "none" and device.type == "cuda" and kernels.unusable():
        say(f"--fused {fused} without its kernels: {kernels.unusable()}")
    if fused == "memory" and device.type == "cpu" and settings.action.trains:
        say(
            "note: --fused memory is for GPUs; on a CPU it is slower and saves hardly any memory: "
            "leave it out, and if memory is short take --auto_batch"
        )
