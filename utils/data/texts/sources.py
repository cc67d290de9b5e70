"""Text classification data as cleaned strings: the table of data sets, and what each one gives.

A data set is one module in this folder and one line in `TEXT_DATASETS`. Its function takes
`TextRequest` and returns a `TextSource`: which files it reads, found without reading them (a
cache of tokens is keyed by their content), and how to load them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import UserError

if TYPE_CHECKING:  # --help reads the table below, and needs no NumPy
    import numpy as np

# Settings that only `--dataset csv` has.
FILE_FLAGS = ("train_file", "test_file", "val_file", "test_fraction")

# Name -> "module:function", imported on use.
TEXT_DATASETS = {
    "ag_news": "utils.data.texts.ag_news:open_ag_news",
    "csv": "utils.data.texts.csv_texts:open_csv",
    "headlines": "utils.data.texts.headlines:open_headlines",
}


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts and their classes: `labels` is (samples,) int64."""

    texts: list[str]
    labels: np.ndarray

    def __post_init__(self) -> None:
        assert self.labels.shape == (len(self.texts),) and self.labels.dtype == "int64"

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, index: np.ndarray) -> Texts:
        """The samples `index` (n,) int64, in that order."""
        return Texts([self.texts[i] for i in index], self.labels[index])


@dataclass(frozen=True, eq=False)
class TextData:
    """A whole data set.

    `fingerprint` is a SHA-256 (hexadecimal) of texts (after cleaning), labels and class names.
    `val` is there only where the data set brings its own validation split. `skipped` counts the
    rows left out by `on_bad="skip"`; `notes` are lines for the console: what was guessed.
    """

    name: str
    classes: list[str]
    train: Texts
    test: Texts
    fingerprint: str
    source: str
    val: Texts | None = None
    synthetic: bool = False
    skipped: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TextRequest:
    """The arguments of `load_text_data` but for the name."""

    data_dir: Path
    train_file: Path | None = None
    test_file: Path | None = None
    val_file: Path | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    on_bad: str = "error"
    clean: bool = True
    test_fraction: float | None = None

    def refuse(self, name: str, why: str, *flags: str) -> None:
        """UserError for the first of the settings `flags` that is given and has no effect."""
        for flag in flags:
            if getattr(self, flag) not in (None, ()):
                raise UserError(
                    f"--{flag} has no effect on --dataset {name}, which {why}: leave it out, or "
                    "use --dataset csv"
                )


@dataclass(frozen=True)
class TextSource:
    """A data set that is found but not read yet.

    `files` are what it will read, by role ("train", "test", ...). `version` is that of its own
    content and of the code that reads it.
    """

    name: str
    files: dict[str, Path]
    version: int
    description: str
    load: Callable[[], TextData]


def open_text_data(
    name: str,
    *,
    data_dir: str | Path,
    train_file: str | Path | None = None,
    test_file: str | Path | None = None,
    val_file: str | Path | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    on_bad: str = "error",
    clean: bool = True,
    test_fraction: float | None = None,
) -> TextSource:
    """Find the data set `name` of `TEXT_DATASETS`, downloading what is missing; see
    `load_text_data` for arguments and errors."""
    if name not in TEXT_DATASETS:
        known = ", ".join(sorted(TEXT_DATASETS))
        raise UserError(f"unknown data set {name!r}: --dataset takes one of {known}")
    if on_bad not in ("error", "skip"):
        raise UserError(f"--on_bad takes error or skip, not {on_bad!r}")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise UserError(f"--test_fraction must lie between 0 and 1, not {test_fraction}")
    module, function = TEXT_DATASETS[name].split(":")
    settings = TextRequest(
        data_dir=Path(data_dir),
        train_file=None if train_file is None else Path(train_file),
        test_file=None if test_file is None else Path(test_file),
        val_file=None if val_file is None else Path(val_file),
        text_columns=tuple(map(str, text_columns or ())),  # YAML may give numbers
        label_column=None if label_column is None else str(label_column),
        on_bad=on_bad,
        clean=clean,
        test_fraction=test_fraction,
    )
    return getattr(importlib.import_module(module), function)(settings)


def load_text_data(name: str, **settings) -> TextData:
    """Load the data set `name` of `TEXT_DATASETS`. All other arguments are given by name:

    Args:
        data_dir: where the files lie (ag_news: also where they are downloaded to).
        train_file, test_file, val_file: the user's own files (csv only), see `text_files`.
        text_columns: names or numbers (from 1) of the columns with text, joined with a space;
            None: guessed for each file by itself.
        label_column: name or number of the column with the class; None: guessed likewise.
        on_bad: "error" or "skip", for rows that cannot be used.
        clean: remove markup, links and broken entities (`clean_text`).
        test_fraction: share in (0, 1) of the training file that becomes the test set (csv
            without a test file only), always the same rows.

    Raises:
        UserError: the data is missing, broken or unsuitable, or a setting does not apply to it.
    """
    return open_text_data(name, **settings).load()


def text_fingerprint(classes: Sequence[str], splits: dict[str, Texts | None]) -> str:
    """SHA-256 (hexadecimal) over class names and each split's name, size, labels and texts."""
    digest = hashlib.sha256(json.dumps(list(classes)).encode())
    for name, split in splits.items():
        if split is None:
            continue
        digest.update(json.dumps([name, len(split)]).encode())
        digest.update(split.labels.astype("<i8").tobytes())
        for text in split.texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()
