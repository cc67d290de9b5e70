"""The tensors of a model, for code that calls it with others in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelTensors:
    """The tensors of a model that every rank holds in full. A strategy that shards parameters
    overrides these methods to gather them; they are then collective.

    All are keyed by their names in the model, in the same order on every rank.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def weights(self) -> dict[str, Tensor]:
        """All parameters, in full; those with `requires_grad` are trained."""
        return dict(self.model.named_parameters())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the mean loss over the global batch, for the parameters that have one."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def buffers(self) -> dict[str, Tensor]:
        """All buffers; the caller must not change them."""
        return dict(self.model.named_buffers())


def names_of_shared(model: nn.Module) -> dict[str, str]:
    """{further name: first name} of the tensors that the model holds under several names."""
    first_names: dict[Tensor, str] = {}
    further = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first_name = first_names.setdefault(tensor, name)
            if first_name != name:
                further[name] = first_name
    return further
