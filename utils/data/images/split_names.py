"""What splits are called in the names of folders, lists and shards, and which names are ignored."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import UserError

# Roboflow exports valid/, Keras' examples have validation/.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
# The usual endings of pictures, for a first look at a folder, which imports no decoder.
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".heic", ".tif", ".tiff", ".webp")
ENDINGS = (".csv", ".tsv")  # of lists
_IGNORED = {"thumbs.db", "desktop.ini", "__macosx"}
FIRST_LOOK = 50  # files of a folder


def is_ignored(name: str) -> bool:
    """Of a file or folder that is hidden, or that an operating system has left there."""
    return name.startswith(".") or name.lower() in _IGNORED


def class_folder(root: str | Path) -> str | None:
    """The first folder in `root` that has a picture by its name; None: none has."""
    try:
        inner = (path for path in Path(root).iterdir() if not is_ignored(path.name))
        for folder in sorted(path for path in inner if path.is_dir()):
            some = itertools.islice(folder.iterdir(), FIRST_LOOK)
            if any(path.suffix.lower() in PICTURES for path in some):
                return str(folder)
    except OSError:  # whoever reads the data says why
        pass
    return None


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


def split_words(shards: Sequence[Sequence[str]]) -> list[str | None]:
    """The word that tells the split of each shard; None: none does.

    A folder or a file whose name begins with such a word decides, the folder first. Else the word
    may stand anywhere in these names, as in imagenet1k-train-0000.tar. But if no name of any shard
    begins with one, such words count only if each shard has one, and they tell training shards
    from others.

    Args:
        shards: of each one the names of its folders and of itself.
    """
    words = [next(filter(None, map(first_word, parts)), None) for parts in shards]
    inner = [_inner_word(parts) for parts in shards]
    splits = {word and SPLITS[word] for word in inner}
    if any(words) or ("train" in splits and len(splits) > 1 and None not in splits):
        return [word or other for word, other in zip(words, inner, strict=True)]
    return words


def _inner_word(parts: Sequence[str]) -> str | None:
    """The word of a split anywhere in these names; None: there is none, or several splits'."""
    words = [word for part in parts for word in re.findall("[a-z]+", part.lower())]
    words = [word for word in words if word in SPLITS]
    return words[0] if len({SPLITS[word] for word in words}) == 1 else None
