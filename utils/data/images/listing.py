"""Pictures that lie in files of their own, as a data set: `imagefolder` and `csv` list them.

The files are decoded once into a cache (cache.py), whose key changes when they change; large sets
are decoded while training instead, and only indexed (record_index.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UserError
from ...plural import counted
from ..groups import ASK, FOLDER, NONE, Groups, groups_of, groups_of_files, likely_files
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
from .records import FileState
from .scanning import FolderPart, SplitFiles

# Bytes of decoded pictures above which `decode="auto"` does not keep them.
LARGEST_DECODED = 32 * 10**9
FILES_AT_ONCE = 512  # that a task of indexing reads


@dataclass(frozen=True)
class Listing:
    """The files of one split."""

    root: Path
    classes: list[str]
    paths: list[str]  # relative to root, or absolute
    labels: list[int]
    stats: list[tuple[int, int]]  # (bytes, time of modification in ns)
    strays: list[str]  # files beside the pictures that are none, such as notes.txt
    notes: list[str]  # for the user
    group_names: list[str] | None = None  # one for each file, by --group_column
    groups: Groups | None = None

    def path(self, number: int) -> str:
        return os.path.join(self.root, self.paths[number])


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
    listings = _with_groups(name, listings, request)
    image_size = request.image_size or _choose_size(first)
    size = sum(len(listing.paths) for listing in listings.values()) * 3 * image_size**2
    if request.decode == "always" or (request.decode == "auto" and size > LARGEST_DECODED):
        files = {split: _to_index(data_dir, listing) for split, listing in listings.items()}
        request = replace(request, image_size=image_size)
        data = load_encoded(name, data_dir, files, request, first.classes)
    else:
        data = _load_decoded(name, listings, request, image_size)
    notes = [note for listing in listings.values() for note in listing.notes]
    return replace(data, notes=[*notes, *data.notes])


def _with_groups(
    name: str, listings: dict[str, Listing], request: PictureRequest
) -> dict[str, Listing]:
    """The listings with their groups, or with a note on what looks like some."""
    by, column, first = request.group_by, request.group_column, next(iter(listings.values()))
    names = {split: one.group_names for split, one in listings.items() if one.group_names}
    if by == column == ASK and (request.val_fraction or request.test_fraction is not None):
        first.notes.extend(likely_files(first.paths, first.labels))
    if by not in (ASK, NONE):
        below = name == "imagefolder"
        for split, one in listings.items():
            paths = one.paths if by == FOLDER else _names(request.data_dir, one)
            names[split] = groups_of_files(paths, by, below)
    flag = f"--group_by {by}" if column in (ASK, NONE) else f"--group_column {column}"
    groups = groups_of(flag, names)
    return {split: replace(one, groups=groups.get(split)) for split, one in listings.items()}


def _load_decoded(
    name: str, listings: dict[str, Listing], request: PictureRequest, image_size: int
) -> ImageData:
    data_dir, form = request.data_dir, request.form
    folder = request.cache_dir / _key(listings, image_size, form)
    cache, source = open_cache(folder), f"{data_dir}, memory-mapped from {folder}"
    if cache is None:
        source = f"{data_dir}, decoded into {folder}"
        sources = {
            split: of_files([*map(one.path, range(len(one.paths)))], one.labels, form)
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
    for split, listing in listings.items():
        one, groups = splits[split], listing.groups
        if groups is not None and one.origins is None:
            raise UserError(f"{folder} is of an earlier version, which knew no groups: remove it")
        groups = groups and groups.part(one.origins[:, 0])
        splits[split] = replace(one, path_of=listing.path, groups=groups)
    used = by_use(splits, index.classes, request.test_fraction)
    statistics, fingerprint = (index.mean, index.std), index.fingerprint
    if used["train"].groups is not None:
        key = f"{fingerprint} {used['train'].groups.key}"
        fingerprint = hashlib.sha256(key.encode()).hexdigest()
    if request.test_fraction is not None:  # both are parts of one cache, for any fraction
        division = f"{fingerprint} {request.test_fraction!r} {TEST_SEED}"
        fingerprint = hashlib.sha256(division.encode()).hexdigest()
        statistics = kept_statistics(folder, fingerprint, lambda: channel_statistics(used["train"]))
    data = ImageData(
        name, index.classes, *statistics, **used, fingerprint=fingerprint, source=source,
        skipped=index.skipped,
    )  # fmt: skip
    return with_notes(data, folder, form, index.skipped_first)


def _choose_size(listing: Listing) -> int:
    """The side of the pictures if they are square, equal and small, else DEFAULT_SIZE.

    Judged by the first picture with a readable header among the first five files of each class.
    """
    sizes = set()
    tried: dict[int, int] = {}
    done = set()
    for path, label in zip(listing.paths, listing.labels, strict=True):
        if label in done or tried.get(label, 0) == 5:
            continue
        tried[label] = tried.get(label, 0) + 1
        try:
            with strict_pillow(), open_image(os.path.join(listing.root, path)) as image:
                sizes.add(image.size)
        except Exception:  # decoding reports it as a bad file
            continue
        done.add(label)
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
    names = itertools.chain.from_iterable(listing.paths for listing in listings.values())
    jpegs = all(name.lower().endswith((".jpg", ".jpeg")) for name in names)
    what = [VERSION, image_size, *form.key(jpegs)]
    digest = hashlib.sha256(json.dumps(what).encode())
    for name, listing in listings.items():
        digest.update(json.dumps([name, listing.classes]).encode())
        lines = [
            f"{path}\0{size}\0{modified}\0"
            for path, (size, modified) in zip(listing.paths, listing.stats, strict=True)
        ]
        digest.update(os.fsencode("".join(lines)))
        digest.update(json.dumps(listing.labels).encode())
    return digest.hexdigest()


def _names(data_dir: Path, listing: Listing) -> list[str]:
    """The paths of the files, relative to `data_dir` or absolute."""
    prefix = os.path.relpath(listing.root, data_dir)
    return [os.path.normpath(os.path.join(prefix, path)) for path in listing.paths]


def _to_index(data_dir: Path, listing: Listing) -> SplitFiles:
    names = _names(data_dir, listing)
    pieces = [slice(start, start + FILES_AT_ONCE) for start in range(0, len(names), FILES_AT_ONCE)]
    parts: list = [FolderPart(names[piece], listing.labels[piece]) for piece in pieces]
    return SplitFiles(parts, [FileState(*state) for state in listing.stats], listing.groups)
