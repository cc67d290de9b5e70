"""The protocol TrainingLoader has all that is used of a loader, and the loaders have it all."""

import ast
from pathlib import Path

import numpy as np
import pytest
from toy import CPU, loader

from utils.data.texts.loader import TextLoader
from utils.training.loader import TrainingLoader

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = {name for name in vars(TrainingLoader) if not name.startswith("_")}
MEMBERS |= set(TrainingLoader.__annotations__)


def text_loader(**options):
    lengths = np.arange(1, 13)
    offsets = np.append(0, np.cumsum(lengths))
    tokens, labels = np.zeros(offsets[-1], np.int64), np.arange(12) % 2
    return TextLoader(
        tokens, offsets, labels, batch_size=4, device=CPU, max_len=16, shuffle=True, **options
    )


@pytest.mark.parametrize("tokens", [None, 20])
def test_both_loaders_are_training_loaders(tokens):
    texts = text_loader(batch_tokens=tokens)
    assert isinstance(loader(), TrainingLoader) and isinstance(texts, TrainingLoader)
    assert texts.micro_batch == (tokens or 4)
    assert texts.batch_flag == ("--batch_tokens" if tokens else "--batch_size")


def asked_of_loaders(path: Path) -> set[str]:
    """Attributes that the code uses of names that are, or end in, `loader`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", None)) == "loader":
                found.add(node.attr)
    return found


def test_nothing_else_is_used_of_a_loader():
    asked = set()
    for room in ("training", "engines", "runs"):
        for path in (ROOT / "utils" / room).rglob("*.py"):
            asked |= asked_of_loaders(path)
    assert asked <= MEMBERS, asked - MEMBERS
    assert MEMBERS - asked == {"resize"}  # used by utils/tasks, of the other splits' loaders
