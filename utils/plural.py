"""Numbers of things in messages."""


def counted(number: float, noun: str) -> str:
    """(1, "step") -> "1 step"; (1200, "batch") -> "1,200 batches"; (0.5, "epoch") -> "0.5
    epochs"."""
    text = f"{number:g}" if isinstance(number, float) else f"{number:,}"
    return f"{text} {plural(noun, number)}"


def plural(noun: str, number: float) -> str:
    """The noun as it stands after the number."""
    if number == 1:
        return noun
    return noun + ("es" if noun.endswith(("s", "tch")) else "s")
