"""Mixup and CutMix: every sample is mixed with a partner, and so are their targets.

Mixup: Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: beyond empirical risk minimization" (2018),
arXiv:1710.09412. CutMix: Yun et al., "CutMix: regularization strategy to train strong classifiers
with localizable features" (2019), arXiv:1905.04899.

What is drawn (`Mixing.draw`) is a choice for a whole optimizer step, made on the host; each
micro-batch takes its slice, and gets it as a `MixPlan` on its device, which the objective applies.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError
from utils.pieces import piece_borders
from utils.to_device import to_device

# Both are on: the share of the steps that CutMix takes, timm's default of its switch.
CUTMIX_SHARE = 0.5


# ---- the mathematics --------------------------------------------------------------------------


def mix(inputs: Tensor, partner: Tensor, lam: Tensor) -> Tensor:
    """x_i <- lam_i x_i + (1 - lam_i) x_p(i); lam_i = 1 leaves x_i as it is, to the bit.

    Args:
        inputs: (n, ...) floating point: pictures, embeddings, representations of sentences.
        partner: (n,) int64.
        lam: (n,), 0 to 1; differentiable.
    """
    return mix_pairs(inputs, inputs[partner], lam)


def mix_pairs(own: Tensor, other: Tensor, lam: Tensor) -> Tensor:
    """lam own + (1 - lam) other; (n, ...), (n, ...), (n,)."""
    weight = lam.to(own.dtype).view(-1, *(1,) * (own.ndim - 1))
    return torch.lerp(other, own, weight)


def paste(inputs: Tensor, partner: Tensor, box: Tensor) -> Tensor:
    """Within its box each picture shows its partner.

    Args:
        inputs: (n, channels, height, width).
        partner: (n,) int64.
        box: (4, n) int64: top, bottom, left, right in pixels, the ends outside.
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
    """(n,) int64: a permutation of each block of `block` neighbours, cut as in utils/pieces.py. A
    sample that is its own partner stays as it is."""
    blocks = pairwise(piece_borders(n, block))
    return np.concatenate([start + generator.permutation(end - start) for start, end in blocks])


def cut_boxes(lam: np.ndarray, centre: np.ndarray, height: int, width: int) -> np.ndarray:
    """Boxes of the share 1 - lam of the picture and of its shape, cut off at its borders.

    Args:
        lam: (n,), 0 to 1.
        centre: (2, n) from 0 to 1, below and to the right of the upper left corner.
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


def kept_share(box: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n,): lam as the boxes came out, the share of the picture outside of its box."""
    top, bottom, left, right = box
    return 1 - (bottom - top) * (right - left) / (height * width)


def spread_evenly(n: int, count: int) -> np.ndarray:
    """(m,) int64, m = min(count, n): places among 0 to n - 1 with equal spaces, about. Place i is
    one of them where floor((i + 1) m / n) > floor(i m / n)."""
    m = min(count, n)
    return np.flatnonzero(np.diff(np.arange(n + 1) * m // n))


# ---- the plan ---------------------------------------------------------------------------------


class MixPlan(NamedTuple):
    """How a micro-batch of n samples is mixed; tensors on its device.

    A model that mixes inside (representations of sentences, say) is handed the plan and calls
    `apply` there.
    """

    partner: Tensor  # (n,) int64, within the micro-batch
    lam: Tensor  # (n,) float32: weight of the sample's own target; where `learned`, see Draws
    box: Tensor | None = None  # (4, n) int64: CutMix; None: mixup
    learned: bool = False  # lam is still to be chosen by meta-mixup
    # (m,) int64: places of the pairs that an update of the policy looks at; None: there is none
    looked_at: Tensor | None = None
    pairs: int = 0  # so many does it look at in the whole step

    def apply(self, inputs: Tensor) -> Tensor:
        """(n, ...) -> (n, ...), mixed."""
        if self.box is None:
            return mix(inputs, self.partner, self.lam)
        return paste(inputs, self.partner, self.box)

    def with_lam(self, lam: Tensor) -> MixPlan:
        """The plan with the lambda that was chosen."""
        return self._replace(lam=lam, learned=False)


class Draws(NamedTuple):
    """What was drawn for n samples of an optimizer step; arrays on the host."""

    partner: np.ndarray  # (n,) int64
    # (n,) float32: lambda; where `learned` what meta-mixup makes it from: its start, or the
    # quantile of its distribution (see Mixing)
    lam: np.ndarray
    box: np.ndarray | None  # (4, n) int64
    learned: bool
    different: bool  # only partners of another class count
    clean: int = 0  # clean samples that go with the step's last micro-batch
    clean_each: bool = False  # with every micro-batch
    looked_at: np.ndarray | None = None  # as in the plan, in ascending order
    pairs: int = 0  # as in the plan

    def slice(self, piece: slice) -> Draws:
        """Of a micro-batch; its borders must not cut a block."""
        looked_at = self.looked_at
        if looked_at is not None:
            inside = (looked_at >= piece.start) & (looked_at < piece.stop)
            looked_at = looked_at[inside] - piece.start
        return self._replace(
            partner=self.partner[piece] - piece.start,
            lam=self.lam[piece],
            box=None if self.box is None else self.box[:, piece],
            looked_at=looked_at,
        )

    def filler(self, n: int) -> Draws:
        """Of n samples that are in a micro-batch to fill it, and stay as they are."""
        return self._replace(
            partner=np.arange(n),
            lam=np.ones(n, np.float32),
            box=None,
            looked_at=None if self.looked_at is None else np.arange(0),
        )

    def plan(self, targets: Tensor) -> MixPlan:
        """On the device of `targets` (n,), the classes of the samples; the host does not wait."""
        device = targets.device
        partner, lam = to_device(self.partner, device), to_device(self.lam, device)
        box = None if self.box is None else to_device(np.ascontiguousarray(self.box), device)
        if self.different:
            own = torch.arange(len(targets), device=device)
            partner = torch.where(targets[partner] == targets, own, partner)
        looked_at = None if self.looked_at is None else to_device(self.looked_at, device)
        return MixPlan(partner, lam, box, self.learned, looked_at, self.pairs)


class Mixing:
    """Draws how the samples of each step are mixed.

    Args:
        alpha: mixup's lambda ~ Beta(alpha, alpha); 0: no mixup.
        cutmix_alpha: the same of CutMix; 0: no CutMix. With both each step takes one of the two,
            with equal probability.
        probability: of being mixed, 0 to 1: of a step, or with `per_sample` of a sample.
        per_sample: a lambda for every sample, else one for the step.
        block: partners lie within blocks of so many neighbours; batch_size is a multiple of it.
        off_epoch: from this epoch on nothing is mixed, counted from 0; 0: never.
        different: mix only pairs of different classes.
        height, width: of the pictures, for CutMix.
        learned: mixup's lambda is chosen later, by meta-mixup: "" (it is not), "policy" (a quantile
            from 1/2 to 1 is drawn in its place) or "sample" (Beta is where its choice starts).
        clean: samples of the clean batch that a learned lambda needs, and pairs that an update of
            a policy looks at, evenly spread over the step.
        clean_every: steps of the run between two clean batches of a policy.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        probability: float = 1.0,
        per_sample: bool = False,
        block: int,
        off_epoch: int = 0,
        different: bool = False,
        height: int = 1,
        width: int = 1,
        learned: str = "",
        clean: int = 0,
        clean_every: int = 1,
    ):
        if alpha < 0 or cutmix_alpha < 0 or not alpha + cutmix_alpha:
            raise ValueError("alpha or cutmix_alpha must be above 0, and none below")
        if learned not in ("", "policy", "sample"):
            raise ValueError(f"learned is '', 'policy' or 'sample', not {learned!r}")
        self.alpha, self.cutmix_alpha, self.probability = alpha, cutmix_alpha, probability
        self.per_sample, self.block, self.off_epoch = per_sample, block, off_epoch
        self.different, self.height, self.width = different, height, width
        self.learned, self.clean, self.clean_every = learned, clean, clean_every

    def check(self, samples: int, step_size: int) -> None:
        """Raises UserError where an epoch of so many samples has none apart from a step's."""
        if self.learned and samples - step_size < 2:
            raise UserError(
                f"--mixup meta learns from samples apart from the batch, and all {samples:,} "
                f"training samples are in a step of {step_size:,}: take a smaller --batch_size"
            )

    def draw(self, n: int, epoch: int, step: int, generator: np.random.Generator) -> Draws | None:
        """For the n samples of optimizer step `step` (of the run); None: it is not mixed.

        What is off is drawn too, so that the rest stays the same.
        """
        if self.off_epoch and epoch >= self.off_epoch:
            return None
        partner = draw_partners(n, self.block, generator)
        switch = generator.random()
        count = n if self.per_sample else 1
        mixed, quantile, *centre = generator.random((4, count))
        cut = self.cutmix_alpha and (not self.alpha or switch < CUTMIX_SHARE)
        learned, box = bool(self.learned) and not cut, None
        alpha = self.cutmix_alpha if cut else self.alpha
        if learned and self.learned == "sample":
            lam = generator.beta(alpha, alpha, n)
        elif learned:
            lam = 0.5 + 0.5 * quantile
        else:
            lam = generator.beta(alpha, alpha, count)
        if cut:
            box = cut_boxes(lam, np.stack(centre), self.height, self.width)
            lam = kept_share(box, self.height, self.width)
            box = np.repeat(box, n // count, 1)
        if self.per_sample:
            partner = np.where(mixed < self.probability, partner, np.arange(n))
        elif mixed[0] >= self.probability:
            return None
        each = self.learned == "sample"
        due = learned and (each or step % self.clean_every == 0)
        looked_at = spread_evenly(n, self.clean) if due and not each else None
        return Draws(
            partner,
            np.broadcast_to(lam, n).astype(np.float32),
            box,
            learned,
            self.different,
            self.clean if due else 0,
            each,
            looked_at,
            0 if looked_at is None else len(looked_at),
        )
