"""A data set of encoded pictures: its index, classes, splits and statistics."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UserError
from ..groups import Groups
from ..splits import TEST_SEED, split_off
from .decode import in_threads, strict_pillow
from .decoded import Statistics, kept_statistics, statistics_of
from .image_data import ImageData, PictureRequest
from .imagenet import told_apart
from .notes import with_notes
from .record_index import find_index
from .records import EncodedPictures
from .scanning import Part

if TYPE_CHECKING:
    from ..workers import WorkerPool
    from .loader import EncodedLoader

DEFAULT_SIZE, LARGEST_KEPT_SIZE = 224, 64
# Pictures of the training split from which mean and standard deviation are computed.
MEASURED = 4096
_DECODED_AT_ONCE = 64


def load_encoded(
    name: str,
    root: Path,
    files: dict[str, list[Part]],
    request: PictureRequest,
    classes: list[str] | None,
    groups: dict[str, Groups] | None = None,
) -> ImageData:
    """The data set of the pictures in `files`, below `root`, which are indexed if need be.

    Args:
        files: by split, see `by_use`.
        classes: their names, to which numbers are added where they are alike; None: numbers, as
            many as the labels need.
        groups: of the files of each split; None: they have none.

    Raises:
        UserError: see `find_index`; or the labels do not fit the classes.
    """
    found, form = find_index(root, files, request), request.form
    labels = {
        split: records.table["label"].astype(np.int64) for split, records in found.splits.items()
    }
    first = next(iter(labels.values()))
    if classes is None:
        lowest = 1 if first.min() == 1 else 0  # some count from 1: 0 was for the background
        labels = {split: values - lowest for split, values in labels.items()}
        classes = [str(number + lowest) for number in range(int(first.max()) + 1 - lowest)]
    elif first.min() == 1 and first.max() == len(classes):
        labels = {split: values - 1 for split, values in labels.items()}
    _check_labels(root, labels, classes)
    image_size = request.image_size or _choose_size(found.splits[next(iter(files))].table)
    splits = {
        split: EncodedSplit(EncodedPictures(records, image_size, form), labels[split])
        for split, records in found.splits.items()
    }
    used = by_use(splits, classes, request.test_fraction, groups or {})
    what = [found.index.fingerprint, classes, image_size, form.crop_ratio, request.test_fraction]
    what += [used["train"].groups.names.tolist()] if groups else []
    key = hashlib.sha256(json.dumps(what + form.key()).encode()).hexdigest()
    size = sum(map(len, labels.values())) * 3 * image_size**2 / 1e9
    statistics = kept_statistics(
        found.folder, key, lambda: _statistics(used["train"], request.threads)
    )
    source = f"{root}, decoded while training (all decoded would take {size:,.2f} GB), with the "
    source += f"index {found.folder}"
    skipped = found.index.skipped
    names = told_apart(dict(enumerate(classes)))  # not of the key, so that earlier runs can go on
    data = ImageData(
        name, names, *statistics, **used, fingerprint=key, skipped=skipped, source=source
    )
    return with_notes(data, found.folder, form, found.index.skipped_first)


def by_use(
    splits: dict[str, Any],
    classes: list[str],
    test_fraction: float | None,
    groups: dict[str, Groups],
) -> dict[str, Any]:
    """`train`, `test`, `val` and `val_is_test` of ImageData.

    Args:
        splits: {"train", "test" and/or "val"}, or {"all"} to be divided by `test_fraction`; val is
            the validation split if there is a test split, else the test set. {"test"} alone, for a
            trained model, is `train`, too.
        groups: of the files of each split; empty: they have none.
    """
    for name, of_files in groups.items():
        split = splits[name]
        splits[name] = replace(split, groups=of_files.part(split.origins[:, 0]))
    if test_fraction is not None:
        kept, held_out = split_off(splits["all"], test_fraction, TEST_SEED, classes)
        splits = {"train": kept, "test": held_out}
    test, val = splits.get("test"), splits.get("val")
    if test is None:
        return {"train": splits["train"], "test": val, "val": None, "val_is_test": True}
    return {"train": splits.get("train", test), "test": test, "val": val, "val_is_test": False}


def _check_labels(root: Path, labels: dict[str, np.ndarray], classes: list[str]) -> None:
    if len(classes) < 2:
        raise UserError(f"the pictures in {root} have a single class: a classifier needs two")
    for split, values in labels.items():
        if values.min() < 0 or values.max() >= len(classes):
            wrong = values.min() if values.min() < 0 else values.max()
            raise UserError(
                f"the label {wrong} of a picture of {split} in {root} is not among the "
                f"{len(classes):,} classes of the training pictures"
            )
    counts = np.bincount(next(iter(labels.values())), minlength=len(classes))
    if not counts.all() and list(labels) != ["test"]:
        lost = classes[int(counts.argmin())]
        raise UserError(
            f"no readable training picture in {root} is of class {lost!r}: add some, or remove the "
            "class"
        )


def _choose_size(table: np.ndarray) -> int:
    """The side of the pictures if they are square, equal and small, else DEFAULT_SIZE."""
    side = int(table["height"][0])
    if side <= LARGEST_KEPT_SIZE and all((table[key] == side).all() for key in ("height", "width")):
        return side
    return DEFAULT_SIZE


def _statistics(train: EncodedSplit, workers: int) -> Statistics:
    """Mean and standard deviation per channel, of MEASURED pictures drawn from the training split
    (always the same ones), or of all if there are fewer."""
    chosen = np.arange(len(train))
    if len(train) > MEASURED:
        chosen = np.sort(np.random.default_rng(TEST_SEED).permutation(len(train))[:MEASURED])
    with strict_pillow():
        return statistics_of(_decoded(train.part(chosen), workers))


def _decoded(split: EncodedSplit, workers: int) -> Iterator[np.ndarray]:
    """The central squares, (up to _DECODED_AT_ONCE, size, size, 3) uint8 at a time."""
    rows = np.arange(len(split)) if split.rows is None else split.rows
    starts = range(0, len(rows), _DECODED_AT_ONCE)
    pieces = (rows[start : start + _DECODED_AT_ONCE] for start in starts)
    return in_threads(split.pictures.decode, pieces, workers, "decode")


@dataclass(frozen=True, eq=False)
class EncodedSplit:
    """Encoded pictures and their classes. A part of a split shares `pictures` with the whole."""

    pictures: EncodedPictures
    labels: np.ndarray  # (samples,) int64
    rows: np.ndarray | None = None  # (samples,) int64: of the records; None: all, in order
    groups: Groups | None = None

    on_disk = encoded = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a decoded picture: height, width, channels."""
        return self.pictures.size, self.pictures.size, 3

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: np.ndarray) -> EncodedSplit:
        """The samples `index` (n,) int64 of this split, in that order."""
        rows = index if self.rows is None else self.rows[index]
        groups = self.groups and self.groups.part(index)
        return EncodedSplit(self.pictures, self.labels[index], rows, groups)

    @property
    def origins(self) -> np.ndarray:
        """(records, 2) int64: as of DecodedSplit."""
        table = self.pictures.records.table
        sums = table["length"].astype(np.int64) << 32 | table["check"]
        return np.stack([table["file"], sums], 1)

    def picture(self, row: int) -> np.ndarray:
        return self.pictures.decode(np.array([row]))[0]

    def file(self, row: int) -> io.BytesIO:
        """With its name for messages."""
        file = io.BytesIO(self.pictures.records.read(row))
        file.name = self.pictures.records.describe(row)  # type: ignore[attr-defined]  # as of files
        return file

    def name(self, sample: int) -> str:
        """The file of a sample, and where it is in a shard."""
        return self.pictures.records.describe(sample if self.rows is None else self.rows[sample])

    def resized(self, size: int) -> EncodedSplit:
        """The same samples, decoded to another size."""
        return replace(self, pictures=replace(self.pictures, size=size))

    def loader(self, *, pool: WorkerPool | None = None, **options) -> EncodedLoader:
        """Batches of these pictures, decoded by the processes of `pool`, if there is one."""
        from .loader import EncodedLoader  # PyTorch takes seconds

        return EncodedLoader(self.pictures, self.labels, rows=self.rows, pool=pool, **options)
