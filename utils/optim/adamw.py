"""AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), arXiv:1711.05101.

The learning rate is about the change of a weight in a step; weight decay shrinks the weight by it
times the learning rate.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UserError
from .entry import OptimizerEntry, Range, optimizer_flag

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class AdamFlags:
    betas: str = optimizer_flag(
        "0.9,0.999",
        "Decay in each step of the averages of the gradient and of its square or norm, with adamw, "
        "lamb, fusedadam, fusedlamb and fusednovograd",
        many=True,
    )
    eps: float | None = optimizer_flag(
        None,
        "Added to the root of the averaged square, with adamw, lamb, fusedadam and fusedlamb, or "
        "to the averaged norm, with fusednovograd",
        above=0,
        default_text="1e-8; 1e-6 with lamb and fusedlamb",
    )

    def values(self, eps: float = 1e-8) -> dict:
        """As the classes of optimizers take them; `eps`: its default."""
        return {"betas": betas_of(self.betas), "eps": eps if self.eps is None else self.eps}


@dataclass
class AdamPartFlags:
    adam_lr_scale: float | None = optimizer_flag(
        None,
        "Learning rate of what muon and ngd leave to Adam, which is embeddings, norms, biases and "
        "the classifier, in multiples of --lr; --head_lr replaces it for the head",
        above=0,
        default_text="0.4 with --ngd_orthogonal, else 1",
        before=1.0,
    )


def betas_of(text: str) -> tuple[float, float]:
    """The two numbers of `--betas`. Raises UserError."""
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        first = second = -1.0
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UserError(f"--betas {text}: two numbers of 0 or more and below 1, as in 0.9,0.999")
    return first, second


def make(
    groups: list[dict], *, lr: float, kind: Callable[..., "Optimizer"] | None = None, **flags
) -> "Optimizer":
    """`kind`: the class; None: PyTorch's. `flags`: of AdamFlags."""
    import torch

    kind = kind or functools.partial(torch.optim.AdamW, fused=True)
    return kind(groups, lr=lr, **AdamFlags(**flags).values())


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
