"""Freezes the backbone while the head trains.

Its parameters require no gradient, so autograd keeps nothing of its forward pass and computes
nothing below the head; its BatchNorms use their running statistics and do not update them.
"""

from torch import nn


class Freeze:
    """Args:
    model: of which the layer `head` always trains.
    until: the epoch (from 0) from which on everything trains; None: never.
    """

    def __init__(self, model: nn.Module, head: str, until: int | None = None):
        self.model, self.until = model, until
        self.head = model.get_submodule(head)

    def frozen(self, epoch: int) -> bool:
        return self.until is None or epoch < self.until

    def apply(self, epoch: int) -> None:
        """Sets the model to training mode as far as it trains in `epoch`."""
        frozen = self.frozen(epoch)
        self.model.train(not frozen)
        self.model.requires_grad_(not frozen)
        self.head.train()
        self.head.requires_grad_(True)
