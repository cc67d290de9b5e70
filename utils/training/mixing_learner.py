"""The interface of an object that learns how samples are mixed."""

from typing import Protocol

from torch import Tensor

from utils.data.batch import Batch
from utils.mixup.mixing import MixPlan


class MixingLearner(Protocol):
    """Chooses lambda in each micro-batch, and learns from each step (see mixup/meta.py).

    `lr` is the learning rate of the optimizer in that step.
    """

    def choose(self, batch: Batch, lr: float) -> MixPlan | None:
        """The plan of the micro-batch, with lambda filled in; None: it is not mixed."""

    def update(self, bad: Tensor, lr: float) -> None:
        """Learns from a step; called when the weights' `grad` holds its gradient.

        Args:
            bad: () bool: the step is not applied, so nothing is learned from it.
        """

    def mean_lambda(self) -> Tensor | None:
        """(classes, classes) for the report; None: nothing is learned about classes."""

    def state_dict(self) -> dict[str, Tensor]:
        """What was learned, for checkpoints."""

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
