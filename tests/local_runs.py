"""What the tests of local steps share."""

import torch
from torch import nn
from toy import network


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


def double_network(**options):
    """In float64, for comparisons beyond the rounding of float32."""
    return nn.Sequential(ToDouble(), *network(**options)).double()


def parameters_of(trainer) -> dict:
    with trainer.steps.evaluated_weights():
        return {name: p.detach().clone() for name, p in trainer.steps.model.named_parameters()}


def assert_same_checkpoint(one, other) -> None:
    """All but the times and what belongs to processes."""
    assert one.parts.keys() == other.parts.keys()
    for part, tensors in one.parts.items():
        assert tensors.keys() == other.parts[part].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other.parts[part][name]), (part, name)
    for key in ("workers", "local", "random", "optimizer", "scaler", "schedule"):
        assert one.state.get(key) == other.state.get(key), key
