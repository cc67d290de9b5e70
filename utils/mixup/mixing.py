"""Mixup and CutMix: each sample is mixed with a partner, and so are their targets.

Mixup: Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: beyond empirical risk minimization" (2018),
arXiv:1710.09412. CutMix: Yun et al., "CutMix: regularization strategy to train strong classifiers
with localizable features" (2019), arXiv:1905.04899.

`Mixing.draw` draws partners and lambdas for a whole optimizer step on the host. Each micro-batch
takes its slice as a `MixPlan` on its device, which the objective applies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..pieces import piece_borders
from ..to_device import to_device

# With mixup and CutMix both on: fraction of the steps with CutMix; timm's default switch_prob.
CUTMIX_FRACTION = 0.5


# ---- the mathematics --------------------------------------------------------------------------


def mix_pairs(own: Tensor, other: Tensor, lam: Tensor) -> Tensor:
    """x_i <- lam_i x_i + (1 - lam_i) x_p(i); with lam_i = 1 x_i stays the same to the bit.

    Args:
        own, other: (n, ...) floating point: images, embeddings or sentence representations; those
            of the samples x_i and of their partners x_p(i).
        lam: (n,), 0 to 1; differentiable.
    """
    return torch.lerp(other, own, lam.to(own.dtype).view(-1, *(1,) * (own.ndim - 1)))


def paste(inputs: Tensor, partner: Tensor, box: Tensor) -> Tensor:
    """Pastes the partner's pixels into each image's box.

    Args:
        inputs: (n, channels, height, width).
        partner: (n,) int64.
        box: (4, n) int64: top, bottom, left, right in pixels; bottom and right exclusive.
    """
    top, bottom, left, right = box[:, :, None].unbind()  # (n, 1) each
    height, width = inputs.shape[2:]
    row = torch.arange(height, device=inputs.device)
    column = torch.arange(width, device=inputs.device)
    rows = (row >= top) & (row < bottom)  # (n, height)
    columns = (column >= left) & (column < right)  # (n, width)
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]  # (n, 1, height, width)
    return torch.where(inside, inputs[partner], inputs)


def draw_partners(n: int, block: int, generator: np.random.Generator) -> np.ndarray:
    """(n,) int64: a permutation within each block of `block` consecutive samples, with borders as
    in utils/pieces.py. A sample may be its own partner, and is then not mixed."""
    blocks = pairwise(piece_borders(n, block))
    return np.concatenate([start + generator.permutation(end - start) for start, end in blocks])


def cut_boxes(lam: np.ndarray, centre: np.ndarray, height: int, width: int) -> np.ndarray:
    """Boxes with the image's aspect ratio and 1 - lam of its area, clipped at its borders.

    Args:
        lam: (n,), 0 to 1.
        centre: (2, n), y and x as fractions of the size, 0 to 1, from the upper left.
    Returns:
        (4, n) int64: top, bottom, left, right in pixels.
    """
    side = np.sqrt(1 - lam)
    edges = []
    for size, place in ((height, centre[0]), (width, centre[1])):
        half = (size * side).astype(np.int64) // 2
        middle = (size * place).astype(np.int64)
        edges += [np.clip(middle - half, 0, size), np.clip(middle + half, 0, size)]
    return np.stack(edges)


def area_outside(box: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n,): the fraction of each image outside its box, which is the actual lam after rounding and
    clipping."""
    top, bottom, left, right = box
    return 1 - (bottom - top) * (right - left) / (height * width)


def spread_evenly(n: int, count: int) -> np.ndarray:
    """(m,) int64, m = min(count, n): indices from 0 to n - 1, evenly spaced up to rounding: those i
    with floor((i + 1) m / n) > floor(i m / n)."""
    m = min(count, n)
    return np.flatnonzero(np.diff(np.arange(n + 1) * m // n))


# ---- the plan ---------------------------------------------------------------------------------


class MixPlan(NamedTuple):
    """How a micro-batch of n samples is mixed; tensors on its device.

    A model that mixes internally, sentence representations for example, takes the plan as an
    argument and calls `apply` itself.
    """

    partner: Tensor  # (n,) int64, within the micro-batch
    lam: Tensor  # (n,) float32: weight of the sample itself; if `lam_pending`, see Draws
    box: Tensor | None = None  # (4, n) int64: CutMix; None: mixup
    lam_pending: bool = False  # meta-mixup has yet to choose lam
    # (m,) int64: samples whose pairs the policy's update uses; None: no update in this step
    update_pairs: Tensor | None = None
    update_total: int = 0  # pairs of the whole step that the update uses

    def apply(self, inputs: Tensor) -> Tensor:
        """(n, ...) -> (n, ...), mixed."""
        if self.box is None:
            return mix_pairs(inputs, inputs[self.partner], self.lam)
        return paste(inputs, self.partner, self.box)

    def with_lam(self, lam: Tensor) -> MixPlan:
        """The plan with the lambda that meta-mixup chose."""
        return self._replace(lam=lam, lam_pending=False)


class Draws(NamedTuple):
    """The random choices for n samples of an optimizer step; arrays on the host."""

    partner: np.ndarray  # (n,) int64
    # (n,) float32: lambda; if `lam_pending`, what meta-mixup computes it from (see Mixing)
    lam: np.ndarray
    box: np.ndarray | None  # (4, n) int64
    lam_pending: bool
    different_classes: bool  # do not mix pairs of the same class
    clean_samples: int = 0  # of the clean batch, which comes with the step's last micro-batch
    clean_per_micro_batch: bool = False  # every micro-batch has such a clean batch
    update_pairs: np.ndarray | None = None  # as in MixPlan, in ascending order
    update_total: int = 0  # as in MixPlan

    def slice(self, piece: slice) -> Draws:
        """The draws of a micro-batch, whose borders must not cut through a block."""
        update_pairs = self.update_pairs
        if update_pairs is not None:
            inside = (update_pairs >= piece.start) & (update_pairs < piece.stop)
            update_pairs = update_pairs[inside] - piece.start
        return self._replace(
            partner=self.partner[piece] - piece.start,
            lam=self.lam[piece],
            box=None if self.box is None else self.box[:, piece],
            update_pairs=update_pairs,
        )

    def filler(self, n: int) -> Draws:
        """Draws for n samples that pad a micro-batch; they are not mixed."""
        return self._replace(
            partner=np.arange(n),
            lam=np.ones(n, np.float32),
            box=None,
            update_pairs=None if self.update_pairs is None else np.arange(0),
        )

    def plan(self, targets: Tensor) -> MixPlan:
        """The plan on the device of `targets`, (n,), the samples' classes; without a host sync."""
        device = targets.device
        partner, lam = to_device(self.partner, device), to_device(self.lam, device)
        box = None if self.box is None else to_device(np.ascontiguousarray(self.box), device)
        if self.different_classes:
            own = torch.arange(len(targets), device=device)
            partner = torch.where(targets[partner] == targets, own, partner)
        update_pairs = None if self.update_pairs is None else to_device(self.update_pairs, device)
        return MixPlan(partner, lam, box, self.lam_pending, update_pairs, self.update_total)


@dataclass(kw_only=True, eq=False)
class Mixing:
    """Draws how the samples of each step are mixed.

    Args:
        alpha: mixup's lambda ~ Beta(alpha, alpha); 0: no mixup.
        cutmix_alpha: the same for CutMix; 0: no CutMix. With both on, each step uses one of the
            two, with equal probability.
        probability: that a step is mixed, or with `per_sample` or `per_block` a sample or block, 0
            to 1.
        per_sample: a lambda for each sample instead of one for the step.
        per_block: a lambda for each block.
        block: a sample and its partner are in the same block of this many consecutive samples; the
            batch size is a multiple of it.
        off_epoch: from this epoch on, counted from 0, nothing is mixed; None: always mix.
        different_classes: mix only pairs of different classes.
        height, width: of the images, for CutMix.
        meta_form: how meta-mixup chooses mixup's lambda: "policy", as the quantile of a learned
            distribution at a probability between 1/2 and 1, which is drawn in place of lambda; or
            "sample", by a step from lambda as drawn. None: lambda is as drawn.
        clean_samples: size of the clean batch of meta-mixup, and number of pairs, evenly spaced
            over the step, that an update of the policy uses.
        update_every: steps between two updates of the policy, each with a clean batch.
        strength: called with the step of the run, returns a factor of both alphas, 0 to 1; at 0
            the step is not mixed. None: always 1.
    """

    alpha: float = 0.0
    cutmix_alpha: float = 0.0
    probability: float = 1.0
    per_sample: bool = False
    per_block: bool = False
    block: int
    off_epoch: int | None = None
    different_classes: bool = False
    height: int = 1
    width: int = 1
    meta_form: str | None = None
    clean_samples: int = 0
    update_every: int = 1
    strength: Callable[[int], float] | None = None

    def with_block(self, block: int) -> Mixing:
        """The same, with partners within blocks of another size."""
        return dataclasses.replace(self, block=block)

    def check(self, samples: int, step_size: int) -> None:
        """Raises UserError where an epoch of `samples` leaves no clean samples outside a step."""
        if self.meta_form and samples - step_size < 2:
            raise UserError(
                f"--mixup meta learns from samples outside the batch, but a step of "
                f"{step_size:,} takes all {samples:,} training samples: choose a smaller "
                "--batch_size"
            )

    def draw(self, n: int, epoch: int, step: int, generator: np.random.Generator) -> Draws | None:
        """Draws for the n samples of optimizer step `step` of the run; None: the step is not mixed.

        Random numbers are drawn for disabled features, too, so that enabling one does not change
        the others' draws; only `per_sample`, `per_block` and `block` do.
        """
        if self.off_epoch is not None and epoch >= self.off_epoch:
            return None
        strength = 1.0 if self.strength is None else self.strength(step)
        if not strength:
            return None
        partner = draw_partners(n, self.block, generator)
        switch = generator.random()
        group_sizes = self.lambda_group_sizes(n)
        chance, upper_half, *centre = generator.random((4, len(group_sizes)))
        use_cutmix = self.cutmix_alpha and (not self.alpha or switch < CUTMIX_FRACTION)
        meta_form, box = None if use_cutmix else self.meta_form, None
        alpha = strength * (self.cutmix_alpha if use_cutmix else self.alpha)
        if meta_form == "policy":
            lam = 0.5 + 0.5 * upper_half
        else:
            lam = generator.beta(alpha, alpha, n if meta_form == "sample" else len(group_sizes))
        if use_cutmix:
            box = cut_boxes(lam, np.stack(centre), self.height, self.width)
            lam = area_outside(box, self.height, self.width)
            box = np.repeat(box, group_sizes, 1)
        is_mixed = chance < self.probability
        if not (self.per_sample or self.per_block or is_mixed[0]):
            return None
        partner = np.where(np.repeat(is_mixed, group_sizes), partner, np.arange(n))
        updates_policy = meta_form == "policy" and step % self.update_every == 0
        needs_clean = updates_policy or meta_form == "sample"
        update_pairs = spread_evenly(n, self.clean_samples) if updates_policy else None
        return Draws(
            partner,
            (lam if len(lam) == n else np.repeat(lam, group_sizes)).astype(np.float32),
            box,
            lam_pending=meta_form is not None,
            different_classes=self.different_classes,
            clean_samples=self.clean_samples if needs_clean else 0,
            clean_per_micro_batch=self.meta_form == "sample",
            update_pairs=update_pairs,
            update_total=0 if update_pairs is None else len(update_pairs),
        )

    def lambda_group_sizes(self, n: int) -> np.ndarray:
        """(groups,) int64, sum n: sizes of the runs of samples that share a lambda."""
        if self.per_sample:
            return np.ones(n, np.int64)
        return np.diff(piece_borders(n, self.block if self.per_block else n))
