"""What splits are called in the names of folders, lists and shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from utils.errors import UserError

# Roboflow exports valid/, Keras' examples have validation/.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
VAL = tuple(word for word, split in SPLITS.items() if split == "val")


def by_split(root: Path, named: Mapping[str, str]) -> dict[str, str]:
    """Split -> the word that means it, in the order train, val, test.

    Args:
        root: of the data set, for messages.
        named: words of SPLITS, each with the name of a file or folder that it stands in.

    Raises:
        UserError: two words mean the same split.
    """
    words: dict[str, str] = {}
    for word, split in SPLITS.items():
        if word not in named:
            continue
        if split in words:
            raise UserError(
                f"{root} has both {named[words[split]]} and {named[word]}, which mean the same "
                "split: keep one of them, and move the other away"
            )
        words[split] = word
    return words


def first_word(name: str) -> str | None:
    """The word of a split with which a name begins; None: with none. The Hugging Face hub writes
    partial-train where it has converted the beginning of train alone."""
    word = re.match("(?:partial-)?([a-z]*)", name.lower())[1]
    return word if word in SPLITS else None


def split_word(parts: Iterable[str]) -> str | None:
    """The word that tells the split of a shard; None: none does.

    A folder or a file whose name begins with such a word decides, the folder first. Else the word
    may stand anywhere in these names, as in imagenet1k-train-0000.tar.

    Args:
        parts: names of the shard's folders and of itself.

    Raises:
        UserError: words of several splits are in the names, and none begins one.
    """
    parts = list(parts)
    if (word := next(filter(None, map(first_word, parts)), None)) is not None:
        return word
    words = [word for part in parts for word in re.findall("[a-z]+", part.lower())]
    words = [word for word in words if word in SPLITS]
    if len({SPLITS[word] for word in words}) > 1:
        raise UserError(
            f"{'/'.join(parts)} has both {words[0]} and {words[-1]} in its name: let the name "
            "begin with its split, or move the shard into a folder named after it"
        )
    return words[0] if words else None
