"""What predictions of pictures and of texts share."""

import contextlib
from collections.abc import Iterator

from torch import nn

from ..errors import UserError


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def not_a_number(sample: str) -> UserError:
    return UserError(
        f"the model's answer to {sample} is not a number: try --precision fp32, or another "
        "checkpoint"
    )
