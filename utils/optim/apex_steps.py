"""Apex's optimizer classes, made to keep what this program promises of an optimizer (see apex.py).

A step that is not finite is taken back (`HonoursFoundInf`). The state is laid out as that of adamw,
lamb and sgd, so a run can be resumed where Apex is missing, or has been installed since.

Apex counts the steps of a group, PyTorch's AdamW those of each parameter. They differ for
parameters that join later (--unfreeze_epoch): Apex corrects their moments by the group's count.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from utils.exchange import Exchange
from utils.optim.adam_flags import betas_of
from utils.optim.found_inf import HonoursFoundInf
from utils.optim.parameters import is_dense


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
    """Why Apex's kernels cannot step these parameters; empty if they can.

    Args:
        exchange: with the other ranks.
    """
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


def make_adam(
    groups: list[dict], *, lr: float, betas: str = "0.9,0.999", eps: float | None = None
) -> torch.optim.Optimizer:
    eps = 1e-8 if eps is None else eps
    return _classes()["adam"](groups, lr=lr, betas=betas_of(betas), eps=eps)


def make_lamb(
    groups: list[dict],
    *,
    lr: float,
    betas: str = "0.9,0.999",
    eps: float | None = None,
    lamb_bias_correction: bool = True,
) -> torch.optim.Optimizer:
    return _classes()["lamb"](
        groups,
        lr=lr,
        betas=betas_of(betas),
        eps=1e-6 if eps is None else eps,
        bias_correction=lamb_bias_correction,
        max_grad_norm=float("inf"),  # --clip limits the norm
    )


def make_sgd(
    groups: list[dict], *, lr: float, momentum: float, nesterov: bool = True
) -> torch.optim.Optimizer:
    nesterov = nesterov and momentum > 0
    optimizer = _classes()["sgd"](groups, lr=lr, momentum=momentum, nesterov=nesterov)
    # There from the start, as sgd's own (sgd.py).
    for group in optimizer.param_groups:
        for parameter in group["params"] if momentum else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


MAKE: dict = {"fusedadam": make_adam, "fusedlamb": make_lamb, "fusedsgd": make_sgd}


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
def _classes() -> dict[str, type]:
    from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

    class ApexAdam(_CountsLikeAdamW, HonoursFoundInf, FusedAdam):
        pass

    class ApexLamb(_CountsGroups, HonoursFoundInf, FusedLAMB):
        pass

    class ApexSgd(HonoursFoundInf, FusedSGD):
        pass

    return {"adam": ApexAdam, "lamb": ApexLamb, "sgd": ApexSgd}
