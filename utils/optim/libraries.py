"""Optimizers of timm, made to honour `found_inf`. timm is imported when one is made.

Their state is made at their first step, which therefore takes longer than the others.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


def lamb(groups: list[dict], *, lr: float) -> Optimizer:
    """LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes"
    (2020), arXiv:1904.00962, algorithm 2.

    Parameters without weight decay take the plain step of Adam. Where some join later
    (--unfreeze_epoch), they begin with the bias correction of the step at which they join, since
    timm counts by group: without weight decay their first steps are up to 6.5 times those of Adam.
    (timm also scales the gradient down to a norm of 1 by default, which is no part of the paper:
    that is what --clip is for.)
    """
    return _honouring("Lamb")(groups, lr=lr, max_grad_norm=None)


def madgrad(groups: list[dict], *, lr: float, momentum: float) -> Optimizer:
    """MADGRAD: Defazio and Jelassi, "Adaptivity without compromise: a momentumized, adaptive, dual
    averaged gradient method for stochastic optimization" (2022), arXiv:2101.11075."""
    return _honouring("MADGRAD")(groups, lr=lr, momentum=momentum)


def muon(groups: list[dict], *, lr: float, momentum: float) -> Optimizer:
    """Muon, with Nesterov momentum: Jordan et al., "Muon: an optimizer for hidden layers in neural
    networks" (2024), https://kellerjordan.github.io/posts/muon/.

    As recommended there, a kernel (out, in, height, width) is the matrix (out, in * height *
    width), and the last matrix of the first group, which is the classifier's, those of the other
    groups, which are tables of embeddings, and all that are no matrices (or too narrow ones) are
    left to Adam, with Nesterov momentum and decoupled weight decay. Steps are
    scaled to those of AdamW, so that both take the same rates: Liu et al., "Muon is scalable for
    LLM training" (2025), arXiv:2502.16982, section 2.2. PyTorch's own Muon takes nothing but
    matrices, and would need a second optimizer beside it.
    """
    group, *others = groups
    matrices = [p for p in group["params"] if p.ndim == 2]
    own = [group]
    if matrices:
        head = matrices[-1]
        hidden = [p for p in group["params"] if p is not head]
        own = [group | {"params": hidden}] if hidden else []
        own.append(group | {"params": [head], "use_fallback": True})
    for other in others:
        tables = any(p.ndim == 2 for p in other["params"])
        own.append(other | {"use_fallback": True} if tables else other)
    groups = own
    return _honouring("Muon")(groups, lr=lr, momentum=momentum, nesterov=True)


def __getattr__(name: str) -> type:
    """The classes by name, as pickle looks them up."""
    if name in ("Lamb", "MADGRAD", "Muon"):
        return _honouring(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _honouring(name: str) -> type:
    """timm's optimizer class of this name, with `found_inf`."""
    import timm.optim

    from utils.optim.found_inf import HonoursFoundInf

    return type(name, (HonoursFoundInf, getattr(timm.optim, name)), {})
