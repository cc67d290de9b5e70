"""Muon, with Nesterov momentum: Jordan et al., "Muon: an optimizer for hidden layers in neural
networks" (2024), https://kellerjordan.github.io/posts/muon/.

    b <- m b + (1 - m) g,   u = (1 - m) g + m b
    w <- (1 - lr weight_decay) w - 0.2 lr sqrt(longer side) O(u)

With `muon_normalize`, instead of weight decay, w <- sqrt(rows) w / |w| before each step, as in
Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), arXiv:2404.00498.

O makes all singular values about 1 (`orthogonalize_` in muon_steps.py). Learning rate and weight
decay mean what they do with AdamW. The results are those of timm's Muon but for rounding.
`torch.optim.Muon` takes nothing but 2-D parameters, so no kernels, and steps them one by one.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .adamw import ADAMW, AdamPartFlags
from .entry import MATRICES, OptimizerEntry, optimizer_flag

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..exchange import Exchange


@dataclass
class MuonFlags(AdamPartFlags):
    muon_normalize: bool = optimizer_flag(
        False,
        "Scale each matrix to rows of norm 1, on average, before each step; for networks whose "
        "norms undo it, instead of weight decay",
    )


def make(
    groups: list[dict],
    *,
    lr: float,
    momentum: float,
    exchange: "Exchange | None" = None,
    heads: "Collection[Tensor]" = (),
    muon_normalize: bool = False,
    adam_lr_scale: float | None = None,
) -> "Optimizer":
    """Adam, with Nesterov momentum and decoupled weight decay, steps the matrices of the classifier
    (`heads`; if there are none, the last matrix of the first group), all of the other groups, which
    are embeddings, and whatever is no matrix or a narrow one. All else takes Muon's steps, a kernel
    (out, in, height, width) as the matrix (out, in * height * width). This is what the page above
    recommends. Muon's steps are scaled to those of AdamW, so that both take the same rates: Liu et
    al., "Muon is scalable for LLM training" (2025), arXiv:2502.16982, section 2.2.
    """
    from ..exchange import Exchange
    from .muon_steps import Muon

    group, *others = groups
    own = [group]
    if of_head := heads_in(group["params"], heads):
        hidden = [p for p in group["params"] if not any(p is each for each in of_head)]
        own = [group | {"params": hidden}] if hidden else []
        own.append(group | {"params": of_head, "use_fallback": True})
    for other in others:
        embeddings = any(p.ndim > 1 for p in other["params"])
        own.append(other | {"use_fallback": True} if embeddings else other)
    if adam_lr_scale not in (None, 1):
        own = _with_rates(own, adam_lr_scale, exchange or Exchange())
    return Muon(own, lr=lr, momentum=momentum, normalize=muon_normalize, exchange=exchange)


def heads_in(parameters: "list[Tensor]", heads: "Collection[Tensor]") -> "list[Tensor]":
    """The matrices of the classifier; if `heads` has none of them, the last matrix."""
    known, matrices = {id(p) for p in heads}, [p for p in parameters if p.ndim == 2]
    return [p for p in matrices if id(p) in known] or matrices[-1:]


def _with_rates(groups: list[dict], lr_scale: float, exchange: "Exchange") -> list[dict]:
    """The groups, what Adam steps in groups of its own with `lr_scale` times the learning rate."""
    from .muon_steps import is_matrix

    divided = []
    for group in groups:
        parts = {True: [], False: []}
        for p in group["params"]:
            parts[not group.get("use_fallback") and is_matrix(exchange.shape(p))].append(p)
        divided.append(group | {"params": parts[True]})
        divided.append(group | {"params": parts[False], "lr_scale": lr_scale})
    return [group for group in divided if group["params"]]


MUON = OptimizerEntry(
    summary="orthogonal steps for kernels and hidden matrices, Adam for the rest",
    make=make,
    # Those of AdamW, to whose steps its own are scaled; the momentum of its authors.
    lr=1e-3,
    weight_decay=0.05,
    momentum=0.95,
    flags=MuonFlags,
    needs=MATRICES,
    takes_exchange=True,
    takes_heads=True,
    capturable=True,
    ranges=ADAMW.ranges,
)
