"""NovoGrad: Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments for
training of deep networks" (2019), arXiv:1905.11286, as Apex's FusedNovoGrad computes it:

    v <- sqrt(b2 v^2 + (1 - b2) |g|^2), at first |g|,   m <- b1 m + (1 - b1) g
    w <- w - lr (m' / (v' + eps) + weight_decay w)

for each parameter, where m' = m / (1 - b1^t), v' = v / sqrt(1 - b2^t), and t counts steps from 1.
The paper adds the decay to the gradient and corrects neither average; as v begins with |g|, the
correction makes the first steps small.

Apex's own class reads norms on the host and keeps them where a checkpoint has no place for them,
and timm's asks the device for a value at each parameter, so this is neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .adamw import AdamFlags
from .entry import NORMS, OptimizerEntry, Range

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..exchange import Exchange


def make(groups: list[dict], *, lr: float, exchange: Exchange | None = None, **flags) -> Optimizer:
    """`flags`: of AdamFlags."""
    from .norm_steps import NovoGrad

    return NovoGrad(groups, lr=lr, exchange=exchange, **AdamFlags(**flags).values())


class NovoGradEntry(OptimizerEntry):
    def remark(self, groups: list[dict], exchange: Exchange | None = None) -> str:
        return "--optimizer fusednovograd is this program's own, with the formula of Apex's"


FUSED_NOVOGRAD = NovoGradEntry(
    summary="Apex's NovoGrad: the gradient of each weight is divided by a running mean of its norm",
    make=make,
    lr=0.03,
    weight_decay=1e-3,
    flags=AdamFlags,
    needs=NORMS,
    takes_exchange=True,
    whole_state=("gradient_norm",),
    group_state=("step",),
    capturable=True,
    ranges={
        "lr": (Range(3e-3, 0.3, grid=(0.01, 0.03, 0.1)),),
        "weight_decay": (Range(1e-5, 0.01, grid=(1e-4, 1e-3, 3e-3)),),
    },
)
