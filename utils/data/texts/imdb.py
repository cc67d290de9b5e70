"""IMDB: 25,000 training and 25,000 test reviews of films, positive or negative, a file each.

They are read from the folder aclImdb/, as train/pos/0_9.txt and so on, or from its archive. The
reviews without a class (train/unsup) are not used.

Maas et al., Learning Word Vectors for Sentiment Analysis (2011),
https://aclanthology.org/P11-1015.
"""

import re
import tarfile
import zlib
from collections.abc import Iterator
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
# Unpacked; the published reviews have up to 14 KB each, and 66 MB in all.
MAX_REVIEW_BYTES, MAX_BYTES = 1 << 20, 1 << 30
_REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/([^/.][^/]*\.txt)$")

# Split, class and name of a review's file, in the order in which reviews are trained on and tested.
Key = tuple[str, str, str]


def open_imdb(name: str, request: TextRequest) -> TextSource:
    """Looks for the reviews in `data_dir`/aclImdb, in `data_dir`, and in the archive
    `data_dir`/aclImdb_v1.tar.gz.

    Raises:
        UserError: they are missing.
    """
    data_dir = request.data_dir
    folders = [at for at in (data_dir / FOLDER, data_dir) if (at / "train" / "pos").is_dir()]
    if folders:
        folder, reviews = folders[0], _reviews_of(folders[0])
        return TextSource(
            name, {"/".join(key): path for key, path in reviews.items()}, VERSION, str(folder),
            lambda: _load(request, _read(reviews), folder),
        )  # fmt: skip
    archive = data_dir / ARCHIVE
    if archive.is_file():
        return TextSource(
            name, {"archive": archive}, VERSION, str(archive),
            lambda: _load(request, _unpack(archive), archive),
        )  # fmt: skip
    raise UserError(
        f"{data_dir} has neither {FOLDER}/ nor {ARCHIVE}: fetch {URL} and put it there, packed or "
        "unpacked, or give --data_dir the folder that has it"
    )


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


def _read(files: dict[Key, Path]) -> Iterator[tuple[Key, bytes]]:
    for key, path in files.items():
        with reading(path):
            content = path.read_bytes()
        yield key, content


def _unpack(archive: Path) -> Iterator[tuple[Key, bytes]]:
    """The reviews of the archive, in the order of `_reviews_of`."""
    reviews: dict[tuple, bytes] = {}
    unpacked = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                found = _REVIEW.search(member.name)
                if not found or not member.isfile():
                    continue
                unpacked += member.size
                if member.size > MAX_REVIEW_BYTES or unpacked > MAX_BYTES or member.issparse():
                    raise tarfile.TarError(f"{member.name} makes it too large")
                reviews[found.groups()] = tar.extractfile(member).read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"{archive} is not a whole archive ({error}): fetch {URL} again") from error
    for split in SPLITS:
        for name in CLASSES:
            keys = [key for key in reviews if key[:2] == (split, name)]
            if not keys:
                raise UserError(f"{archive} has no {split}/{name}/*.txt: fetch {URL} again")
            for key in sorted(keys, key=lambda key: _by_number(key[2])):
                yield key, reviews[key]


def _load(request: TextRequest, reviews: Iterator[tuple[Key, bytes]], source: Path) -> TextData:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    labels: dict[str, list[int]] = {split: [] for split in SPLITS}
    problems = []
    for (split, name, file), data in reviews:
        text = data.decode("utf-8", "surrogateescape")
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
            raise UserError(f"{source}: {problems[0]}: correct it, or use --on_bad skip")
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
