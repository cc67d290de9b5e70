"""A data set of encoded pictures: its index, classes, splits and statistics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from utils.data.images.decode import strict_pillow
from utils.data.images.decoded import Statistics, kept_statistics, statistics_of
from utils.data.images.encoded import EncodedSplit
from utils.data.images.form import Form
from utils.data.images.notes import with_notes
from utils.data.images.record_index import Indexing, find_index
from utils.data.images.records import EncodedPictures
from utils.data.images.scanning import SplitFiles
from utils.data.images.sources import ImageData
from utils.data.images.threads import in_threads
from utils.data.splits import TEST_SEED, stratified_split
from utils.errors import UserError

DEFAULT_SIZE, LARGEST_KEPT_SIZE = 224, 64
# Pictures of the training split from which mean and standard deviation are computed.
MEASURED = 4096
_DECODED_AT_ONCE = 64


def load_encoded(
    name: str,
    root: Path,
    files: dict[str, SplitFiles],
    how: Indexing,
    *,
    classes: list[str] | None,
    image_size: int | None,
    form: Form,
    test_fraction: float | None,
) -> ImageData:
    """The data set of the pictures in `files`, below `root`, which are indexed if need be.

    Args:
        files: {"train", "test" and/or "val"}, or {"all"}, to be divided by `test_fraction`; val is
            the validation split if there is a test split, else the test set.
        classes: their names; None: numbers, as many as the labels need.
        image_size: side in pixels; None: that of the pictures if they are alike and small.

    Raises:
        UserError: see `find_index`; or the labels do not fit the classes.
    """
    found = find_index(root, files, how)
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
    if image_size is None:
        image_size = _choose_size(found.splits[next(iter(files))].table)
    splits = {
        split: EncodedSplit(EncodedPictures(records, image_size, form), labels[split])
        for split, records in found.splits.items()
    }
    if test_fraction is not None:
        kept, held_out = stratified_split(labels["all"], test_fraction, TEST_SEED, classes)
        splits = {"train": splits["all"].part(kept), "test": splits["all"].part(held_out)}
    test, val = splits.get("test"), splits.get("val")
    train = splits.get("train", test)
    val_is_test = test is None
    if val_is_test:
        test, val = val, None
    what = [found.index.fingerprint, classes, image_size, form.crop_ratio, test_fraction]
    key = hashlib.sha256(json.dumps(what + form.key()).encode()).hexdigest()
    size = sum(map(len, labels.values())) * 3 * image_size**2 / 1e9
    mean, std = kept_statistics(found.folder, key, lambda: _statistics(train, how.workers))
    data = ImageData(
        name=name,
        classes=classes,
        mean=mean,
        std=std,
        train=train,
        test=test,
        val=val,
        fingerprint=key,
        skipped=found.index.skipped,
        val_is_test=val_is_test,
        source=f"{root}, decoded while training (all decoded would take {size:,.2f} GB), with the "
        f"index {found.folder}",
    )
    return with_notes(data, found.folder, form, found.index.skipped_first)


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
