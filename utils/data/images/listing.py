"""Pictures that lie in files of their own, as a data set: `imagefolder` and `csv` list them.

The files are decoded once into a cache (cache.py), whose key changes when they change; large sets
are decoded while training instead, and only indexed (record_index.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UserError
from ...plural import counted
from ..groups import Groups, groups_of, groups_of_files, likely_files
from ..splits import TEST_SEED
from .cache import VERSION, build_cache, of_files, open_cache
from .decode import strict_pillow
from .decoded import channel_statistics, kept_statistics
from .encoded_data import (
    DEFAULT_SIZE,
    LARGEST_KEPT_SIZE,
    by_use,
    load_encoded,
)
from .file_formats import open_image
from .image_data import Form, ImageData, NoTestSet, PictureRequest
from .notes import with_notes
from .records import File
from .scanning import FolderPart

# Bytes of decoded pictures above which `decode="auto"` does not keep them.
LARGEST_DECODED = 32 * 10**9
FILES_AT_ONCE = 512  # that a task of indexing reads
TRIED = 5  # files of a class, to tell the size of its pictures


@dataclass(frozen=True)
class Listing:
    """The files of one split."""

    root: Path
    classes: list[str]
    files: list[File]  # their paths are relative to root, or absolute
    labels: list[int]
    strays: list[str]  # files beside the pictures that are none, such as notes.txt
    notes: list[str]  # for the user
    groups: list[str] | None = None  # of each file, by --group_column

    def path(self, number: int) -> str:
        return os.path.join(self.root, self.files[number].path)


def check_test_fraction(data_dir: Path, held_out: list[str], fraction: float | None) -> None:
    """Raises UserError if `fraction` asks for more than is `held_out`, NoTestSet if nothing is."""
    if held_out and fraction is not None:
        raise UserError(
            f"--test_fraction has no effect on {data_dir}, which has {held_out[-1]}: leave it out"
        )
    if not held_out and fraction is None:
        raise NoTestSet(f"{data_dir} has no test set: add --test_fraction 0.2")


def load_listings(name: str, listings: dict[str, Listing], request: PictureRequest) -> ImageData:
    """Decode the files into the cache, or memory-map what an earlier run decoded. Or only index
    them, as `request.decode` says.

    Args:
        name: of the data set.
        listings: by split, see `by_use`.

    Raises:
        UserError: a file cannot be decoded (unless `on_bad` is "skip"), or the cache cannot be
            written.
    """
    data_dir, first = request.data_dir, next(iter(listings.values()))
    if len(first.classes) < 2:
        raise UserError(
            f"{data_dir} has only the class {first.classes[0]!r}: a classifier needs two"
        )
    notes = [note for listing in listings.values() for note in listing.notes]
    groups = _groups(name, listings, request, notes)
    image_size = request.image_size or _choose_size(first)
    size = sum(len(listing.files) for listing in listings.values()) * 3 * image_size**2
    if request.decode == "always" or (request.decode == "auto" and size > LARGEST_DECODED):
        parts: dict[str, list] = {
            split: _parts(data_dir, listing) for split, listing in listings.items()
        }
        request = replace(request, image_size=image_size)
        data = load_encoded(name, data_dir, parts, request, first.classes, groups)
    else:
        data = _load_decoded(name, listings, request, image_size, groups)
    notes += data.notes
    return replace(data, notes=notes)


def _groups(
    name: str, listings: dict[str, Listing], request: PictureRequest, notes: list[str]
) -> dict[str, Groups]:
    """Those of the files of each split; empty if none are asked for. `notes`, the data set's, is
    given lines on groups and on what looks like some."""
    by, column = request.group_by, request.group_column
    paths = {split: [file.path for file in one.files] for split, one in listings.items()}
    if by is not None:
        below_class = name == "imagefolder"
        names = {split: groups_of_files(paths[split], by, below_class) for split in paths}
        return groups_of(f"--group_by {by}", names, notes)
    if column is not None:
        in_lists = {split: one.groups for split, one in listings.items()}
        return groups_of(f"--group_column {column}", in_lists, notes)
    if request.test_fraction is not None or request.val_fraction:  # something is held out
        split, first = next(iter(listings.items()))
        notes += likely_files(paths[split], len(first.classes))
    return {}


def _load_decoded(
    name: str,
    listings: dict[str, Listing],
    request: PictureRequest,
    image_size: int,
    groups: dict[str, Groups],
) -> ImageData:
    data_dir, form = request.data_dir, request.form
    folder = request.cache_dir / _key(listings, image_size, form)
    cache, source = open_cache(folder), f"{data_dir}, memory-mapped from {folder}"
    if cache is None:
        source = f"{data_dir}, decoded into {folder}"
        sources = {
            split: of_files([*map(one.path, range(len(one.files)))], one.labels, form)
            for split, one in listings.items()
        }
        classes = next(iter(listings.values())).classes
        cache = build_cache(folder, sources, classes, request, image_size)
    index, splits = cache
    if index.skipped and request.on_bad == "error":
        raise UserError(
            f"{data_dir} has {counted(index.skipped, 'file')} that cannot be decoded, such as "
            f"{index.skipped_first[0]}: remove what is no picture, or leave it out with --on_bad "
            "skip"
        )
    if groups and any(split.origins is None for split in splits.values()):
        raise UserError(f"{folder} is of an earlier version, which knew no groups: remove it")
    splits = {split: replace(splits[split], path_of=listings[split].path) for split in splits}
    used = by_use(splits, index.classes, request.test_fraction, groups)
    statistics, fingerprint = (index.mean, index.std), index.fingerprint
    if request.test_fraction is not None or groups:  # one cache, for any fraction and groups
        division = f"{fingerprint} {request.test_fraction!r} {TEST_SEED}"
        division += json.dumps(used["train"].groups.names.tolist()) if groups else ""
        fingerprint = hashlib.sha256(division.encode()).hexdigest()
        statistics = kept_statistics(folder, fingerprint, lambda: channel_statistics(used["train"]))
    data = ImageData(
        name, index.classes, *statistics, **used, fingerprint=fingerprint, source=source,
        skipped=index.skipped,
    )  # fmt: skip
    return with_notes(data, folder, form, index.skipped_first)


def _choose_size(listing: Listing) -> int:
    """The side of the pictures if they are square, equal and small, else DEFAULT_SIZE.

    Judged by the first picture with a readable header among the first files of each class.
    """
    sizes = set()
    tried: Counter[int] = Counter()
    for number, label in enumerate(listing.labels):
        if tried[label] == TRIED:
            continue
        tried[label] += 1
        # Any exception: decoding reports a bad file.
        with suppress(Exception), strict_pillow(), open_image(listing.path(number)) as image:
            sizes.add(image.size)
            tried[label] = TRIED
    if len(sizes) == 1:
        width, height = sizes.pop()
        if width == height <= LARGEST_KEPT_SIZE:
            return width
    return DEFAULT_SIZE


def _key(listings: dict[str, Listing], image_size: int, form: Form) -> str:
    """SHA-256 of what the cache depends on: version, size, form, classes, each file's name, stat
    and class.

    Neither `on_bad` nor the division of a single split changes the key.
    """
    files = itertools.chain.from_iterable(listing.files for listing in listings.values())
    jpegs = all(file.path.lower().endswith((".jpg", ".jpeg")) for file in files)
    what = [VERSION, image_size, *form.key(jpegs)]
    digest = hashlib.sha256(json.dumps(what).encode())
    for name, listing in listings.items():
        digest.update(json.dumps([name, listing.classes]).encode())
        lines = [f"{path}\0{size}\0{modified}\0" for path, size, modified in listing.files]
        digest.update(os.fsencode("".join(lines)))
        digest.update(json.dumps(listing.labels).encode())
    return digest.hexdigest()


def _parts(data_dir: Path, listing: Listing) -> list[FolderPart]:
    """What is to be indexed; paths are relative to `data_dir`."""
    prefix = os.path.relpath(listing.root, data_dir)
    files = [
        file._replace(path=os.path.normpath(os.path.join(prefix, file.path)))
        for file in listing.files
    ]
    pieces = [slice(start, start + FILES_AT_ONCE) for start in range(0, len(files), FILES_AT_ONCE)]
    return [FolderPart(files[piece], listing.labels[piece]) for piece in pieces]
