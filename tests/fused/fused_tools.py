"""Helpers for tests of fused modules."""

import copy

import torch
from torch import nn

from utils.fused import fuse


def pair(model: nn.Module, mode: str = "memory") -> tuple[nn.Module, nn.Module]:
    """The model and a fused copy."""
    return model, fuse(copy.deepcopy(model), mode)


def found(model: nn.Module, x: torch.Tensor, direction: torch.Tensor, seed: int = 0) -> dict:
    """Output, gradients and buffers of one forward and backward pass, by name."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = model(x)
    (y * direction).sum().backward()
    result = {"y": y.detach(), "x": x.grad}
    result |= {f"grad/{name}": p.grad for name, p in model.named_parameters()}
    return result | {f"buffer/{name}": b.clone() for name, b in model.named_buffers()}


def assert_close(one: dict, other: dict, **tolerance) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, msg=lambda m, n=name: f"{n}: {m}",
                                   **tolerance)  # fmt: skip
