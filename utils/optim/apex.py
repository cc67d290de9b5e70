"""Apex's optimizers (https://github.com/NVIDIA/apex) under the names that its users know.

FusedAdam, FusedLAMB and FusedSGD compute what adamw, lamb and sgd do. Each of these names takes
Apex's kernels where they can be used, and else PyTorch's or this program's own; a line says which.
As Apex's FusedLAMB does, fusedlamb limits the norm of the gradient to 1, unless --clip is given:
another limit, or 0 for none.

Apex's classes are made to keep what this program promises of an optimizer. A step that is not
finite is taken back (`HonoursFoundInf`). The state is laid out as that of adamw, lamb and sgd, so a
run can be resumed where Apex is missing, or has been installed since.

Apex counts the steps of a group, PyTorch's AdamW those of each parameter. They differ for
parameters that join later (--unfreeze_epoch): Apex corrects their moments by the group's count.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .adamw import ADAMW
from .entry import OptimizerEntry
from .lamb import LAMB
from .sgd import SGD

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..exchange import Exchange


def missing() -> str:
    """Why Apex's optimizers cannot be had here; empty if they can."""
    try:
        # Without amp_C, its extension, Apex can be imported and fails when an optimizer is made.
        for name in ("apex", "amp_C", "apex.optimizers"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        return {
            "apex": "Apex is not installed",
            "amp_C": "Apex is installed without its CUDA extension",
        }.get(error.name or "", f"the apex that is installed has no {error.name}")
    except Exception as error:  # an extension for another PyTorch may raise anything
        return f"Apex cannot be loaded ({' '.join(str(error).split())[:200]})"
    return ""


def unusable(groups: list[dict], exchange: Exchange | None = None) -> str:
    """Why Apex's kernels cannot step these parameters; empty if they can."""
    import torch

    from .multi_tensor import is_dense

    parameters = [parameter for group in groups for parameter in group["params"]]
    if not all(map(on_gpu, parameters)):
        return "Apex's kernels are for GPUs"
    if exchange is not None and any(map(exchange.is_divided, parameters)):
        return "Apex's kernels need whole parameters"
    if any(p.dtype != torch.float32 or not is_dense(p) for p in parameters):
        return "Apex's kernels take dense weights in float32 alone"
    return missing()


def on_gpu(parameter: Tensor) -> bool:
    return parameter.is_cuda


class _CountsGroups:
    """A mixin: the step of a group is a whole number, whoever has saved it."""

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "step" in group:
                group["step"] = int(group["step"])


class _CountsLikeAdamW:
    """A mixin: what is saved has the step at each parameter, as PyTorch's AdamW, in place of one
    for the group."""

    def state_dict(self) -> dict:
        import torch

        saved = super().state_dict()
        for group in saved["param_groups"]:
            step = float(group.pop("step", 0))
            for number in group["params"]:
                if number in saved["state"]:
                    own = saved["state"][number]
                    saved["state"][number] = own | {"step": torch.tensor(step)}
        return saved

    def load_state_dict(self, saved: dict) -> None:
        state, groups = {}, []
        for group in saved["param_groups"]:
            own = {number: saved["state"].get(number, {}) for number in group["params"]}
            steps = [int(values["step"]) for values in own.values() if "step" in values]
            groups.append(group | ({"step": max(steps)} if steps else {}))
            for number, values in own.items():
                if values:
                    state[number] = {k: v for k, v in values.items() if k != "step"}
        super().load_state_dict({"state": state, "param_groups": groups})


@functools.cache
def classes() -> dict[str, Callable[..., Optimizer]]:
    """By their names in the table."""
    from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

    from .found_inf import HonoursFoundInf

    class ApexAdam(_CountsLikeAdamW, HonoursFoundInf, FusedAdam):
        pass

    class ApexLamb(_CountsGroups, HonoursFoundInf, FusedLAMB):
        pass

    class ApexSgd(HonoursFoundInf, FusedSGD):
        pass

    # --clip limits the norm.
    lamb = functools.partial(ApexLamb, max_grad_norm=float("inf"))
    return {"fusedadam": ApexAdam, "fusedlamb": lamb, "fusedsgd": ApexSgd}


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
        limit = "" if self.clip is None else f"; --clip is {self.clip:g} unless given, as in Apex"
        if reason := unusable(groups, exchange if self.takes_exchange else None):
            return f"--optimizer {self.name} is {self.otherwise}, the same formula: {reason}{limit}"
        return (
            f"--optimizer {self.name} is Apex's; weights and state are copied before each step, so "
            f"that one that is not finite can be taken back{limit}"
        )

    def is_capturable(self) -> bool:
        return self.capturable and bool(missing())  # Apex counts steps on the host


def _apex_entry(like: OptimizerEntry, **changes) -> ApexEntry:
    """The entry of the table's optimizer `like`, by Apex's class `changes["name"]` if possible."""
    fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}

    def make(groups: list[dict], *, exchange: Exchange | None = None, **settings) -> Optimizer:
        if like.takes_exchange:
            settings["exchange"] = exchange
        kind = None if unusable(groups, exchange) else classes()[changes["name"]]
        return like.make(groups, kind=kind, **settings)

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
