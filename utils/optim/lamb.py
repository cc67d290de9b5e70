"""LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes"
(2020), arXiv:1904.00962, algorithm 2:

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    u = m' / (sqrt(v') + eps) + weight_decay w
    w <- w - lr (|w| / |u|) u

for each parameter. m' and v' are m and v, corrected for their start at 0 or, without bias
correction, as they are. The learning rate is about the relative change of a parameter in a step.
Parameters without weight decay take plain Adam steps. Where |w| or |u| is 0 the ratio is 1.

timm's class, which computes the same, counts steps on the host, knows no `found_inf`, and takes the
norms of whatever part of a parameter it is given.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .adamw import ADAMW, AdamFlags
from .entry import NORMS, OptimizerEntry, optimizer_flag

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..exchange import Exchange


@dataclass
class LambFlags(AdamFlags):
    lamb_bias_correction: bool = optimizer_flag(
        True,
        "Correct lamb's moments for their start at 0, as its paper does; some programs for large "
        "batches do not",
    )


def make(
    groups: list[dict],
    *,
    lr: float,
    exchange: "Exchange | None" = None,
    kind: Callable[..., "Optimizer"] | None = None,
    **flags,
) -> "Optimizer":
    """`kind`: the class; None: this program's own, the one to which `exchange` matters. `flags`: of
    LambFlags."""
    if kind is None:
        from .norm_steps import Lamb

        kind = functools.partial(Lamb, exchange=exchange)
    given = LambFlags(**flags)
    return kind(groups, lr=lr, bias_correction=given.lamb_bias_correction, **given.values(1e-6))


LAMB = OptimizerEntry(
    summary="Adam with steps in proportion to each layer's weights; for large batches",
    make=make,
    # The rate and decay of ResNet-50 in Wightman, Touvron and Jegou, "ResNet strikes back" (2021),
    # arXiv:2110.00476, whose 5e-3 at 2,048 samples is 1.25e-3 at 128 by the square root of the
    # batch, the rule of LAMB's paper.
    lr=1.25e-3,
    weight_decay=0.02,
    flags=LambFlags,
    needs=NORMS,
    takes_exchange=True,
    group_state=("step",),
    capturable=True,
    ranges=ADAMW.ranges,
)
