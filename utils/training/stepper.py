"""Who takes the optimizer steps of a training."""

from typing import Protocol


class Stepper(Protocol):
    """Takes the steps of a Trainer: the Trainer itself, or what an engine puts in its place."""

    @property
    def settling(self) -> bool:
        """The last step was not like those to come, so its time says nothing about theirs."""

    def forward_backward(self, batch) -> None:
        """Begins a step, or goes on with it, by a micro-batch."""

    def update(self) -> None:
        """Ends the step, after its last micro-batch."""

    def free_memory(self) -> str:
        """Gives back what its steps hold in addition to the memory of the Trainer's own. Returns
        what the user can do to spare it; "" where it holds nothing."""
