"""Apex's optimizers (https://github.com/NVIDIA/apex) under the names that its users know.

FusedAdam, FusedLAMB and FusedSGD compute what adamw, lamb and sgd do. Each of these names takes
Apex's kernels where they can be used, and else PyTorch's or this program's own; a line says which.
As Apex's FusedLAMB does, fusedlamb limits the norm of the gradient to 1, unless --clip is given:
another limit, or 0 for none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.optim.adamw import ADAMW
from utils.optim.entry import OptimizerEntry
from utils.optim.lamb import LAMB
from utils.optim.sgd import SGD

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from utils.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class ApexEntry(OptimizerEntry):
    """An optimizer of the table that Apex has kernels for.

    Attributes:
        name: its name in the table.
        otherwise: what computes it without Apex.
    """

    name: str
    otherwise: str

    def remark(self, groups: list[dict], exchange: Exchange | None = None) -> str:
        from utils.optim.apex_steps import unusable

        limit = "" if self.clip is None else f"; --clip is {self.clip:g} unless given, as in Apex"
        if reason := unusable(groups, exchange if self.takes_exchange else None):
            return f"--optimizer {self.name} is {self.otherwise}, the same formula: {reason}{limit}"
        return (
            f"--optimizer {self.name} is Apex's; weights and state are copied before each step, so "
            f"that one that is not finite can be taken back{limit}"
        )

    def is_capturable(self) -> bool:
        from utils.optim.apex_steps import missing

        return self.capturable and bool(missing())  # Apex counts steps on the host


def _apex_entry(like: OptimizerEntry, **changes) -> ApexEntry:
    """The entry of the table's optimizer `like`, by Apex's class `changes["name"]` if possible."""
    fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}

    def make(groups: list[dict], *, exchange: Exchange | None = None, **settings) -> Optimizer:
        from utils.optim import apex_steps

        if not apex_steps.unusable(groups, exchange):
            return apex_steps.MAKE[changes["name"]](groups, **settings)
        if like.takes_exchange:
            settings["exchange"] = exchange
        return like.make(groups, **settings)

    return ApexEntry(**fields | {"make": make} | changes)


FUSED_ADAM = _apex_entry(
    ADAMW,
    name="fusedadam",
    summary="adamw, by Apex's kernels where they are installed",
    otherwise="PyTorch's fused AdamW",
)
FUSED_LAMB = _apex_entry(
    LAMB,
    name="fusedlamb",
    summary="lamb with --clip 1, by Apex's kernels where they are installed",
    otherwise="this program's lamb",
    clip=1.0,
)
FUSED_SGD = _apex_entry(
    SGD,
    name="fusedsgd",
    summary="sgd, by Apex's kernels where they are installed",
    otherwise="PyTorch's fused SGD",
)
