"""The interface of what takes the optimizer steps of a run."""

from typing import Protocol


class Stepper(Protocol):
    """Takes optimizer steps: a TrainStep itself, or an engine's object around it."""

    @property
    def settling(self) -> bool:
        """The last step was not like those to come (graphs warm up, say): do not time it."""

    def forward_backward(self, batch) -> None:
        """Forward and backward pass of a micro-batch, the first or a further one of a step."""

    def update(self) -> None:
        """The optimizer's update, after the last micro-batch of a step."""

    def free_memory(self) -> str:
        """Frees what it holds beyond the memory of ordinary steps. Returns what the user can do to
        save that memory; "" if there is none."""
