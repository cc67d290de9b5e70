"""AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), arXiv:1711.05101.

The learning rate is about the change of a weight in a step; weight decay shrinks the weight by it
times the learning rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.optim.adam_flags import AdamFlags, betas_of
from utils.optim.entry import OptimizerEntry, Range

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make(
    groups: list[dict], *, lr: float, betas: str = "0.9,0.999", eps: float | None = None
) -> Optimizer:
    import torch

    eps = 1e-8 if eps is None else eps
    return torch.optim.AdamW(groups, lr=lr, betas=betas_of(betas), eps=eps, fused=True)


ADAMW = OptimizerEntry(
    summary="Adam with decoupled weight decay",
    make=make,
    lr=1e-3,
    weight_decay=0.05,
    flags=AdamFlags,
    capturable=True,
    ranges={
        "lr": (Range(1e-4, 0.02, grid=(3e-4, 1e-3, 3e-3)),),
        "weight_decay": (Range(1e-3, 0.5, grid=(0.01, 0.05, 0.2)),),
    },
)
