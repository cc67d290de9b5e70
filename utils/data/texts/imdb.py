"""IMDB: 25,000 training and 25,000 test reviews of films, positive or negative, a file each.

They are read from the folder aclImdb/, as train/pos/0_9.txt and so on. The reviews without a class
(train/unsup) are not used.

Maas et al., Learning Word Vectors for Sentiment Analysis (2011),
https://aclanthology.org/P11-1015.
"""

from pathlib import Path

import numpy as np

from ...errors import UserError
from .clean import clean_text
from .csv_texts import repeated_texts
from .files import broken_text, reading
from .sources import TextData, TextRequest, Texts, TextSource

URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
FOLDER, ARCHIVE = "aclImdb", "aclImdb_v1.tar.gz"
SPLITS, CLASSES = ("train", "test"), ("neg", "pos")
VERSION = 1  # of reading; part of the cache's key

# Split, class and name of a review's file, in the order in which reviews are trained on and tested.
Key = tuple[str, str, str]


def open_imdb(name: str, request: TextRequest) -> TextSource:
    """Looks for the reviews in `data_dir`/aclImdb and in `data_dir`.

    Raises:
        UserError: they are missing.
    """
    data_dir = request.data_dir
    folders = [at for at in (data_dir / FOLDER, data_dir) if (at / "train" / "pos").is_dir()]
    if not folders:
        raise UserError(
            f"{data_dir} has no {FOLDER}/: fetch {URL}, unpack it there (tar -xzf {ARCHIVE}), or "
            "give --data_dir the folder that has it"
        )
    folder, reviews = folders[0], _reviews_of(folders[0])
    return TextSource(
        name, {"/".join(key): path for key, path in reviews.items()}, VERSION, str(folder),
        lambda: _load(request, reviews, folder),
    )  # fmt: skip


def _reviews_of(folder: Path) -> dict[Key, Path]:
    files: dict[Key, Path] = {}
    for split in SPLITS:
        for name in CLASSES:
            part = folder / split / name
            found = sorted(part.glob("[!.]*.txt"), key=lambda path: _by_number(path.name))
            if not found:
                raise UserError(f"{part} has no reviews (*.txt): unpack {ARCHIVE} again")
            files |= {(split, name, path.name): path for path in found}
    return files


def _by_number(name: str) -> tuple[int, str]:
    number = name.partition("_")[0]
    return int(number) if number.isascii() and number.isdecimal() else -1, name


def _load(request: TextRequest, reviews: dict[Key, Path], folder: Path) -> TextData:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    labels: dict[str, list[int]] = {split: [] for split in SPLITS}
    problems = []
    for (split, name, file), path in reviews.items():
        with reading(path):
            text = path.read_bytes().decode("utf-8", "surrogateescape")
        problem = broken_text(text)
        text = clean_text(text) if request.clean else text.strip()
        if problem is None and not text:
            problem = "has no text"
        if problem is None:
            texts[split].append(text)
            labels[split].append(CLASSES.index(name))
            continue
        problems.append(f"{split}/{name}/{file} {problem}")
        if request.on_bad == "error":
            raise UserError(f"{folder}: {problems[0]}: correct it, or use --on_bad skip")
    splits = {split: Texts(texts[split], np.array(labels[split], np.int64)) for split in SPLITS}
    notes = []
    if problems:
        count = "1 review" if len(problems) == 1 else f"{len(problems):,} reviews"
        notes.append(f"{count} left out: {problems[0]}{', ...' if len(problems) > 1 else ''}")
    return TextData(
        classes=list(CLASSES),
        train=splits["train"],
        test=splits["test"],
        skipped=len(problems),
        notes=notes + repeated_texts("the test reviews", texts["train"], texts["test"]),
    )
