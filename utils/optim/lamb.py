"""LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes"
(2020), arXiv:1904.00962, algorithm 2.

The learning rate is about the relative change of a layer's weights; the weight times the weight
decay is added to the step before that is scaled to the layer's norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.optim.entry import NORMS, OptimizerEntry, Range
from utils.optim.libraries import of_timm

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make(groups: list[dict], *, lr: float) -> Optimizer:
    """Parameters without weight decay take plain Adam steps. Those that join later
    (--unfreeze_epoch) begin with the bias correction of that step, since timm counts steps by
    group: without weight decay their first steps are up to 6.5 times as long as Adam's.
    (timm's default also scales the gradient down to a norm of 1, which the paper does not; --clip
    does that.)
    """
    return of_timm("Lamb")(groups, lr=lr, max_grad_norm=None)


LAMB = OptimizerEntry(
    summary="Adam with steps in proportion to each layer's weights; for large batches",
    make=make,
    # The rate and decay of ResNet-50 in Wightman, Touvron and Jegou, "ResNet strikes back" (2021),
    # arXiv:2110.00476, whose 5e-3 at 2,048 samples is 1.25e-3 at 128 by the square root of the
    # batch, the rule of LAMB's paper.
    lr=1.25e-3,
    weight_decay=0.02,
    needs=NORMS,
    group_state=("step",),
    ranges={
        "lr": (Range(1e-4, 0.02, grid=(3e-4, 1e-3, 3e-3)),),
        "weight_decay": (Range(1e-3, 0.5, grid=(0.01, 0.05, 0.2)),),
    },
)
