"""The arguments of a model as tensors alone, as a graph has them, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from utils.mixup.mixing import MixPlan
from utils.packed import PackedTokens

# Dimensions that may differ from call to call, by argument; others are fixed in the graph.
PICTURES, TEXTS, PLAN = {0: "batch"}, {0: "batch", 1: "length"}, {0: "batch"}


def tensors_of(model: nn.Module, inputs: Tensor | PackedTokens, mix_plan=None) -> dict[str, Tensor]:
    """{name: tensor}: `inputs`, and with a plan `partner` and `lam`. Packed texts become rows of
    ids, (n, longest) int64, with the model's padding at their ends."""
    if isinstance(inputs, PackedTokens):
        inputs = inputs.padded(model.pad)
    tensors = {"inputs": inputs}
    if mix_plan is not None:
        tensors |= {"partner": mix_plan.partner, "lam": mix_plan.lam}
    return tensors


def first_of(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Those of the first samples; each gets the next one as its partner."""
    tensors = {name: tensor[:count] for name, tensor in tensors.items()}
    if "partner" in tensors:
        tensors["partner"] = torch.arange(len(tensors["partner"])).roll(-1)
    return tensors


def smaller(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Those of at most `count` samples, fewer than there are, and texts without their last token:
    each dimension of `varying` is smaller. It leaves two samples, since a BatchNorm may need them,
    and a token."""
    tensors = first_of(tensors, max(2, min(count, len(tensors["inputs"]) - 1)))
    inputs = tensors["inputs"]
    if not inputs.is_floating_point() and inputs.shape[1] > 1:
        tensors["inputs"] = inputs[:, :-1]
    return tensors


def kind_of(tensors: dict[str, Tensor]) -> tuple:
    """Equal for arguments that a graph can take."""
    inputs = tensors["inputs"]
    size = inputs.shape[1:] if inputs.is_floating_point() else ()
    return tuple(tensors), inputs.dtype, size


def varying(tensors: dict[str, Tensor]) -> dict[str, dict[int, str]]:
    """The dimensions that may differ from call to call."""
    texts = not tensors["inputs"].is_floating_point()
    return {name: (TEXTS if texts else PICTURES) if name == "inputs" else PLAN for name in tensors}


class Flat(nn.Module):
    """The model as a function of the tensors of `tensors_of`, one by one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, partner: Tensor | None = None, lam: Tensor | None = None):
        if partner is None:
            return self.model(inputs)
        return self.model(inputs, MixPlan(partner, lam))
