"""The flags of Adam and of what is made of it."""

from dataclasses import dataclass

from utils.errors import UserError
from utils.optim.entry import optimizer_flag


@dataclass
class AdamFlags:
    betas: str = optimizer_flag(
        "0.9,0.999",
        "Decay in each step of the averages of the gradient and of its square or norm, with adamw, "
        "lamb, fusedadam, fusedlamb and fusednovograd",
        many=True,
    )
    eps: float | None = optimizer_flag(
        None,
        "Added to the root of the averaged square, with adamw, lamb, fusedadam and fusedlamb, or "
        "to the averaged norm, with fusednovograd",
        above=0,
        default_text="1e-8; 1e-6 with lamb and fusedlamb",
    )


def betas_of(text: str) -> tuple[float, float]:
    """The two numbers of `--betas`. Raises UserError."""
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        first = second = -1.0
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UserError(f"--betas {text}: two numbers of 0 or more and below 1, as in 0.9,0.999")
    return first, second
