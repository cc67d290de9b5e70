"""How the batches of a task are mixed, and what is held out for `--mixup auto`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from utils.data.loader import HoldOut
from utils.data.splits import stratified_order
from utils.data.steps import largest_divisor
from utils.mixup.auto import AutoStrength, held_out_samples
from utils.mixup.mixing import Mixing


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


@dataclass(frozen=True)
class AutoSplit:
    """The training samples whose losses --mixup auto compares.

    Attributes:
        held_out, trained: (m,) int64 each, indices into the training split, with the same classes
            but for rounding.
        strength: of mixing, set by that comparison.
        hold_out: given to the training loader, which leaves those samples out.
    """

    held_out: np.ndarray
    trained: np.ndarray
    strength: AutoStrength
    hold_out: HoldOut


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
