"""Freezes the backbone while the head trains.

Its parameters require no gradient, so autograd keeps nothing of its forward pass and computes
nothing below the head; its BatchNorms use their running statistics and do not update them, and it
drops nothing (dropout, stochastic depth).
"""

from collections.abc import Iterator

from torch import nn


class Freeze:
    """Switches between training the heads alone and training the whole model.

    Args:
        model: parameters outside the heads that require no gradient now remain frozen for good.
        heads: names of the submodules that always train, with all their parameters.
        until: the first epoch (from 0) in which the whole model trains; None: never.
    """

    def __init__(self, model: nn.Module, heads: tuple[str, ...], until: int | None = None):
        self.model, self.until = model, until
        self.heads = [model.get_submodule(head) for head in heads]
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def head_parameters(self) -> Iterator[nn.Parameter]:
        for head in self.heads:
            yield from head.parameters()

    def frozen(self, epoch: int) -> bool:
        return self.until is None or epoch < self.until

    def apply(self, epoch: int) -> None:
        """Puts what trains in `epoch` into training mode, and the rest into evaluation mode."""
        frozen = self.frozen(epoch)
        self.model.train(not frozen)
        for parameter in self._trained:
            parameter.requires_grad_(not frozen)
        for head in self.heads:
            head.train()
            head.requires_grad_(True)
