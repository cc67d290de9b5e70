"""Sources of texts: the table of data sets, and what each of them gives.

A data set is one module in this folder and one line in `TEXT_DATASETS`. Its function takes its name
there and a `TextRequest`, and returns a `TextSource`: the files to read, which are found but not
parsed (the cache of tokens is keyed by their content), and a function that loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...place import resolve

if TYPE_CHECKING:  # --help reads the table below, and needs no NumPy
    import numpy as np

    from ..groups import Groups

MAX_BAD = 0.05  # fraction of the rows that --on_bad skip leaves out
MAX_TOKENS = 2048  # of a text that are kept: the largest --max_len
TOKENIZERS = ("wordpiece", "bpe", "bpe_unicode", "unigram")  # that are trained
# Name -> "module:function", imported on use.
TEXT_DATASETS = {
    "ag_news": "utils.data.texts.published_csv:open_published",
    "amazon_full": "utils.data.texts.published_csv:open_published",
    "amazon_polarity": "utils.data.texts.published_csv:open_published",
    "csv": "utils.data.texts.csv_texts:open_csv",
    "dbpedia": "utils.data.texts.published_csv:open_published",
    "headlines": "utils.data.texts.headlines:open_headlines",
    "imdb": "utils.data.texts.imdb:open_imdb",
    "yahoo_answers": "utils.data.texts.published_csv:open_published",
    "yelp_full": "utils.data.texts.published_csv:open_published",
    "yelp_polarity": "utils.data.texts.published_csv:open_published",
}


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts and their classes; `labels` is (samples,) int64, and so is `lines`, where in their file
    each of them begins, from 1; None: they have no lines."""

    texts: list[str]
    labels: np.ndarray
    groups: Groups | None = None
    lines: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.labels.shape == (len(self.texts),) and self.labels.dtype == "int64"

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, index: np.ndarray) -> Texts:
        """The samples `index` (n,) int64, in that order."""
        groups = self.groups and self.groups.part(index)
        lines = None if self.lines is None else self.lines[index]
        return Texts([self.texts[i] for i in index], self.labels[index], groups, lines)


@dataclass(frozen=True, eq=False)
class TextData:
    """A whole data set.

    `val` is there only where the data set brings its own validation split. `skipped` counts the
    rows left out by `on_bad="skip"`. `notes` are lines for the console, on what was guessed or
    looks wrong.
    """

    classes: list[str]
    train: Texts
    test: Texts
    val: Texts | None = None
    synthetic: bool = False
    skipped: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TextRequest:
    """Which files, columns and rows the user asks for.

    Args:
        data_dir: where the files of a published data set are, or are downloaded to.
        train_file, test_file, val_file: the user's own files (csv only).
        text_columns: names or numbers (from 1) of the columns with text, which are joined with a
            space; empty: guessed for each file by itself.
        label_column: name or number of the column with the class; None: guessed likewise.
        on_bad: "error" or "skip", for rows that cannot be used.
        clean: remove markup, links and broken entities (`clean_text`).
        test_fraction: fraction, in (0, 1), of the training file that becomes the test set, always
            the same rows (csv without a test file only).
        encoding, header: see `decode` in encodings.py, and `choose_columns` in columns.py.
        max_bad: the largest fraction of the rows of a file that `on_bad` "skip" leaves out.
        group_column: name or number of the column with the group of a text (csv only); None: no
            groups.
        labels: table of labels that replace those of the files; None: none do.
    """

    data_dir: Path
    train_file: Path | None = None
    test_file: Path | None = None
    val_file: Path | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    on_bad: str = "error"
    clean: bool = True
    test_fraction: float | None = None
    encoding: str | None = None
    header: bool | None = None
    max_bad: float = MAX_BAD
    group_column: str | None = None
    labels: Path | None = None


@dataclass(frozen=True)
class TextSource:
    """A data set whose files are found but not parsed yet.

    `files` are those that `load` will read, by role ("train", "test", ...). `version` is to be
    raised when built-in content, or the code that reads the files, changes. `description` tells the
    console where the texts come from.
    """

    name: str
    files: dict[str, Path]
    version: int
    description: str
    load: Callable[[], TextData]


def open_text_data(name: str, request: TextRequest) -> TextSource:
    """Finds the data set `name` of `TEXT_DATASETS`, and downloads what is missing.

    Raises:
        UserError: the data is missing.
    """
    source: TextSource = resolve(TEXT_DATASETS[name])(name, request)
    if request.labels is None:
        return source
    files = source.files | {"labels": request.labels}  # its content is part of the cache's key
    return replace(source, files=files, load=lambda: relabel(source.load(), files, request))


def relabel(data: TextData, files: Mapping[str, Path], request: TextRequest) -> TextData:
    """The texts of these files, by role, with `request.labels`. Raises UserError."""
    from ..labels import key_of, relabelled  # imports NumPy

    def keys_of(name: str, split: Texts) -> list:
        if split.lines is None:
            return [None]
        file = files.get(name, files.get("train"))
        return [key_of(file, str(line)) for line in split.lines.tolist()]

    place = request.train_file or request.data_dir
    return relabelled(data, request.labels, request.encoding, place, keys_of)
