"""Numbers of things in messages."""

from utils.plural import counted


def test_one_is_singular_and_all_else_plural():
    said = [counted(n, "step") for n in (0, 1, 2, 1200)]
    assert said == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    said = [counted(n, "epoch") for n in (0.5, 1.0, 2.0)]
    assert said == ["0.5 epochs", "1 epoch", "2 epochs"]
    said = [counted(2, noun) for noun in ("process", "micro-batch", "class", "worker")]
    assert said == ["2 processes", "2 micro-batches", "2 classes", "2 workers"]
