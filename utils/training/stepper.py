"""The interface of an object that takes the optimizer steps of a run."""

from typing import Protocol


class Stepper(Protocol):
    """Takes optimizer steps: a TrainStep itself, or an engine's object around it."""

    @property
    def settling(self) -> bool:
        """Whether the last step was slower than the steps to come, for example while CUDA graphs
        are captured; such a step should not be timed."""

    def forward_backward(self, batch) -> None:
        """Forward and backward pass of a micro-batch, the first or a further one of a step."""

    def update(self) -> None:
        """The optimizer's update, after the last micro-batch of a step."""

    def free_memory(self) -> str:
        """Frees what it holds beyond the memory of ordinary steps. Returns what the user can do to
        save that memory; "" if nothing was held."""
