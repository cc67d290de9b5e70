"""All that a run needs in order to mix: how batches are mixed, what is held out and measured for
`--mixup auto`, and what learns with `--mixup meta`."""

import contextlib
import functools
import math
from collections.abc import Callable

import numpy as np

from ..data.loader import HoldOut, Loader
from ..data.splits import stratified_order
from ..data.steps import largest_divisor
from ..distributed.strategies.base import Strategy
from ..exchange import Exchange
from ..mixup.auto import AutoStrength, held_out_samples
from ..mixup.meta import PolicyMixup, SampleMixup, VirtualStep
from ..mixup.mixing import Mixing
from ..mixup.policy import MixupPolicy, can_tell_pairs_apart
from ..plural import counted
from ..training.class_balance import ClassBalance
from ..training.controls import MixingControl
from ..training.objective import Precision, mixed_cross_entropy
from .task import AutoSplit, Task


def mixing_block(settings, workers: int) -> int:
    """Samples that are mixed with each other. Where a step has fewer blocks than `workers`, which
    share it, they are smaller; if only single samples were left for each, the loader refuses."""
    block = settings.mixup_block or settings.batch_size
    if workers == 1 or settings.global_batch is None:  # None: each worker has batches of its own
        return block
    smaller = largest_divisor(block, settings.global_batch // workers)
    return smaller if smaller > 1 else block


def build_mixing(
    settings,
    height: int = 1,
    width: int = 1,
    *,
    strength: AutoStrength | None,
    workers: int,
    say: Callable[[str], None],
) -> Mixing | None:
    """How training batches are mixed; None: not at all.

    Args:
        height, width: of pictures, in pixels.
        strength: of --mixup auto, see Mixing; None without it.
        workers: among whom training steps are divided.
        say: is given a note if blocks are smaller than the settings say.
    """
    if settings.mixing_name == "none":
        return None
    block = mixing_block(settings, workers)
    if settings.action.trains and block < (settings.mixup_block or settings.batch_size):
        say(
            f"note: samples are mixed within blocks of {block}, since {workers} processes or "
            f"workers share a step of {settings.global_batch}"
        )
    alphas = {"none": 0.0, "auto": 1.0}  # that of auto is scaled by the strength
    return Mixing(
        alpha=alphas.get(settings.mixup, settings.alpha),
        cutmix_alpha=settings.cutmix_alpha,
        probability=settings.mixup_prob,
        per_sample=settings.mixup_mode == "sample",
        per_block=settings.mixup_mode == "block",
        block=block,
        off_epoch=settings.mixup_off_epoch or None,
        different_classes=settings.mixup_inter,
        height=height,
        width=width,
        meta_form=settings.meta_form if settings.mixup == "meta" else None,
        clean_samples=settings.meta_batch,
        update_every=settings.meta_every,
        strength=strength,
    )


def auto_split(settings, labels: np.ndarray) -> AutoSplit | None:
    """For a training split with these labels, (samples,); None without --mixup auto. If the split
    is too small, both parts are empty."""
    if settings.mixup != "auto":
        return None
    # The first sample of every class, with which the order begins, always trains.
    order = stratified_order(labels, settings.seed)[len(np.unique(labels)) :]
    count = held_out_samples(len(labels))
    if 2 * count > len(order):
        count = 0
    chosen = order[: 2 * count]
    # Sorted by class and then dealt out by turns, so that both parts have the same classes.
    chosen = chosen[np.argsort(labels[chosen], kind="stable")]
    held_out, trained = np.sort(chosen[::2]), np.sort(chosen[1::2])
    return AutoSplit(held_out, trained, AutoStrength(count), HoldOut(held_out, len(labels)))


def build_mixing_control(
    task: Task,
    loss: Callable[[Loader], float],
    make_equal: Callable[[], None],
    total_steps: int,
    off_epoch: int | None,
    say: Callable[[str], None] | None,
) -> MixingControl | None:
    """With --mixup auto, what adjusts the strength of mixing. The weights themselves are measured,
    not their moving average.

    Args:
        loss: of the model on the samples of a loader; collective.
        make_equal: called before each measurement; see Strategy.
        off_epoch: from which nothing is mixed any more; None: there is none.
        say: is told what is held out; None: nobody.
    """
    auto, loader = task.auto, task.train
    if auto is None:
        return None
    release_epoch = auto.strength.schedule_measurements(
        total_steps, loader.steps_per_epoch, loader.step_size, off_epoch
    )
    if say is not None:
        say(_description(auto.strength, loader.samples, release_epoch))

    def gap() -> float:
        make_equal()
        trained, held_out = loss(task.trained), loss(task.held_out)
        if not math.isfinite(trained + held_out):
            return math.nan
        return 1 - trained / held_out if held_out else 0.0

    return MixingControl(auto.strength, auto.hold_out, gap, release_epoch, loader.steps_per_epoch)


def _description(strength, samples: int, release_epoch: int) -> str:
    if not strength.held_out:
        return (
            f"note: {samples:,} training samples are too few for --mixup auto to hold some of them "
            f"out: the strength is fixed at {strength.start:g}"
        )
    if not strength.measures:
        return (
            "note: the run is too short for --mixup auto to measure overfitting: nothing is mixed; "
            "--mixup 0.1 (say) mixes all the same"
        )
    first = "epoch" if release_epoch == 1 else counted(release_epoch, "epoch")
    return (
        f"--mixup auto: {strength.held_out:,} of the training samples are held out for the first "
        f"{first}, to measure overfitting; as many others are used twice, so that epochs keep "
        "their length"
    )


def learns_pairs(settings, task: Task, total_steps: int) -> bool:
    """Whether the policy of --mixup meta can learn something about each pair of classes, in a run
    of `total_steps` optimizer steps."""
    step_size = task.train.step_size
    if settings.mixup != "meta" or settings.meta_form != "policy":
        return False
    return can_tell_pairs_apart(
        len(task.card.classes),
        samples=step_size if task.learns_from_all_pairs else min(settings.meta_batch, step_size),
        updates=total_steps // settings.meta_every,
        decay=settings.meta_lr * settings.meta_decay,
    )


def build_meta(
    settings,
    classes: int,
    strategy: Strategy,
    precision: Precision,
    exchange: Exchange | None = None,
    for_pairs: bool = True,
    balance: ClassBalance | None = None,
) -> PolicyMixup | SampleMixup | None:
    """With --mixup meta, the object that learns how to mix.

    Args:
        strategy: holds the model's tensors.
        exchange: with the other ranks; None: no communication.
        for_pairs: see `learns_pairs`.
        balance: the training loss, if it is not plain cross-entropy.
    """
    if settings.mixup != "meta":
        return None
    losses: Callable = functools.partial(
        mixed_cross_entropy, label_smoothing=settings.label_smoothing
    )
    weigh = None
    if balance is not None:
        losses = balance.losses
        weigh = None if balance.weights is None else balance.sample_weights
    # fp16 would lose small gradients without a loss scaler: the virtual step is then in fp32.
    uses_bf16 = precision.name == "bf16"
    autocast = precision.autocast if uses_bf16 else contextlib.nullcontext
    virtual = VirtualStep(
        strategy.skeleton,
        losses,
        autocast,
        settings.meta_exact,
        exchange,
        strategy,
        settings.grad_checkpointing,
        weigh,
    )
    if settings.meta_form == "sample":
        return SampleMixup(virtual, settings.meta_lr)
    policy = MixupPolicy(
        classes, settings.alpha, settings.meta_lr, settings.meta_decay, precision.device, for_pairs
    )
    return PolicyMixup(policy, virtual)
