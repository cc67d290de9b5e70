"""The tensors of a model, for code that calls it with others in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelTensors:
    """Of a model of which every rank holds the whole. A strategy whose ranks hold parts brings them
    together; all ranks then call it at the same times.

    All are by their names in the model, in the same order on every rank.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole; `requires_grad` tells which ones train."""
        return dict(self.model.named_parameters())

    def gradients(self) -> dict[str, Tensor]:
        """Of the mean loss of the whole step, of all ranks; of the parameters that have one."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def buffers(self) -> dict[str, Tensor]:
        """They are not changed."""
        return dict(self.model.named_buffers())
