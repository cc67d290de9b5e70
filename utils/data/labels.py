"""--labels: a table of samples with the labels that they are to have, such as labels_to_check.csv
of a run after a person has corrected it."""

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np

from ..errors import UserError
from .texts.files import read_table

Key = tuple[str, ...]  # of a sample: its absolute path, and in a table its line
SPLITS = ("train", "test", "val")
LEFT_OUT = -1


def key_of(path: str | Path | None, *line: str) -> Key | None:
    return None if path is None else (os.path.abspath(path), *line)


def relabelled(
    data: Any, path: Path, encoding: str | None, place: Path,
    keys_of: Callable[[str, Any], Sequence[Key | None]],
) -> Any:  # fmt: skip
    """`data`, an ImageData or TextData, with the labels of the table at `path`, without the samples
    that have none there. Raises UserError if that cannot be.

    Args:
        place: folder to which files in the table may be relative, or a file in it.
        keys_of: (name, split) -> keys of the samples, None for those that have none.
    """
    # With --eval_data or --val_is_validation a split has two names: it is told by the last.
    named = {id(getattr(data, name)): name for name in SPLITS if getattr(data, name) is not None}
    keys = {name: keys_of(name, getattr(data, name)) for name in named.values()}
    known = {key for some in keys.values() for key in some}
    if None in known:
        raise UserError("--labels is for your own files and tables: leave it out for these data")
    wanted = _read(path, encoding, data.classes, known, place)
    found, told, fingerprint = {}, [], getattr(data, "fingerprint", "")
    for name in keys:
        split = getattr(data, name)
        pairs = zip(keys[name], split.labels.tolist(), strict=True)
        labels = np.array([wanted.get(key, label) for key, label in pairs], np.int64)
        kept = np.flatnonzero(labels != LEFT_OUT)
        least = len(np.unique(split.labels)) if name == "train" else 1
        if len(np.unique(labels[kept])) < least:
            raise UserError(f"{path} leaves too few {name} samples: every class needs one to train")
        found[id(split)] = replace(split.part(kept), labels=labels[kept])
        fingerprint = hashlib.sha256(fingerprint.encode() + labels.tobytes()).hexdigest()
        told.append(f"{int((labels != split.labels)[kept].sum()):,} of {len(labels):,} {name}")
        if left_out := len(labels) - len(kept):
            told[-1] += f" ({left_out:,} left out)"
    line = f"--labels {path}: another label for {', '.join(told)} samples"
    changed = {name: found.get(id(getattr(data, name))) for name in SPLITS}
    changed |= {"fingerprint": fingerprint} if hasattr(data, "fingerprint") else {}
    return replace(data, **changed, notes=[*data.notes, line])


def _read(
    path: Path, encoding: str | None, classes: Sequence[str], known: Collection[Key], place: Path
) -> dict[Key, int]:
    """Key -> class of each row, or LEFT_OUT."""
    table = read_table(path, "sample", encoding)
    names = [(cell or "").strip().lower() for cell in table.names or table.rows[0].cells]
    needed = ["label", "file", "line"][: 1 + max(map(len, known))]
    if not {*needed} <= {*names}:
        raise UserError(f"{path} needs the columns {', '.join(needed)}, as labels_to_check.csv has")
    labels = {normalize("NFC", name): label for label, name in enumerate(classes)}
    # A spreadsheet makes 7 of the class 007.
    numbers = {str(int(name)): label for name, label in labels.items() if name.isdecimal()}
    labels = numbers | labels | {"": LEFT_OUT}
    found: dict[Key, tuple[int, int]] = {}  # class, and line of the table
    for row in table.rows[table.names is None :]:
        problem = row.problem
        if problem is None:
            text, file, *line = ((row.cells[names.index(name)] or "").strip() for name in needed)
            keys = (key_of(one, *line) for one in (file, place / file, place.parent / file))
            key = next((key for key in keys if key in known), None)
            text = normalize("NFC", text)
            label = labels.get(text, labels.get(text.removeprefix("'")))  # see `safe_text`
            if key is None:
                problem = f"names {' line '.join([file, *line])}, which is no sample of these data"
            elif label is None:
                problem = f"has the label {text[:40]!r}, which is none of {', '.join(classes)[:80]}"
            elif found.setdefault(key, (label, row.line))[0] != label:
                problem = f"has another label for {file} than line {found[key][1]}"
        if problem:
            raise UserError(f"{path}, line {row.line} {problem}: correct it, or remove it")
    return {key: label for key, (label, _) in found.items()}
