"""What predictions of pictures and of texts share."""

from ..errors import UserError


def not_a_number(sample: str) -> UserError:
    return UserError(
        f"the model's answer to {sample} is not a number: try --precision fp32, or another "
        "checkpoint"
    )
