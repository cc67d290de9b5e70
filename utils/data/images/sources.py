"""Image classification data as uint8 arrays: the table of data sets, and how samples are divided.

A data set is one module in this folder and one line in `IMAGE_DATASETS`. Its loader takes the
keyword arguments of `load_image_data` and returns an `ImageData`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.errors import UserError

# Name -> "module:function", imported on use: `--dataset shapes` needs no decoder, `--help` nothing.
IMAGE_DATASETS = {
    "cifar10": "utils.data.images.cifar:load_cifar10",
    "cifar100": "utils.data.images.cifar:load_cifar100",
    "fashion_mnist": "utils.data.images.mnist:load_fashion_mnist",
    "imagefolder": "utils.data.images.imagefolder:load_imagefolder",
    "mnist": "utils.data.images.mnist:load_mnist",
    "shapes": "utils.data.images.shapes:load_shapes",
}


@dataclass(frozen=True, eq=False)
class Split:
    """Pictures and their classes.

    `images` may be a read-only memory map, larger than the memory. So a part of a split shares
    the pictures of the whole, and `rows` says which of them are its own.
    """

    images: np.ndarray  # (pictures, height, width, channels) uint8
    labels: np.ndarray  # (samples,) int64
    rows: np.ndarray | None = None  # (samples,) int64: places in `images`; None: all, in order

    def __post_init__(self) -> None:
        assert self.images.ndim == 4 and self.images.dtype == np.uint8
        samples = self.images.shape[:1] if self.rows is None else self.rows.shape
        assert self.labels.shape == samples and self.labels.dtype == np.int64
        assert self.rows is None or self.rows.dtype == np.int64

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: np.ndarray) -> Split:
        """The samples `index` (n,) int64 of this split, in that order; no picture is copied."""
        rows = index if self.rows is None else self.rows[index]
        return Split(self.images, self.labels[index], rows)

    def chunks(self, samples: int) -> Iterator[np.ndarray]:
        """The pictures in order, (up to `samples`, height, width, channels) uint8 at a time."""
        for start in range(0, len(self), samples):
            piece = slice(start, start + samples)
            yield self.images[piece if self.rows is None else self.rows[piece]]


@dataclass(frozen=True, eq=False)
class ImageData:
    """A whole data set.

    `mean` and `std` are per channel, of pixels scaled to 0..1, from the training images alone.
    `fingerprint` is a SHA-256 (hexadecimal) of the content: pixels, labels and class names. `val`
    is there only where the data set brings its own validation split. `skipped` counts the files
    left out by `on_bad="skip"`; `source` says on the console where the pictures came from.
    """

    name: str
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    test: Split
    fingerprint: str
    source: str
    val: Split | None = None
    synthetic: bool = False
    skipped: int = 0


def load_image_data(
    name: str,
    *,
    data_dir: str | Path,
    cache_dir: str | Path,
    image_size: int | None = None,
    on_bad: str = "error",
    test_fraction: float | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> ImageData:
    """Load the data set `name` of `IMAGE_DATASETS`.

    Args:
        data_dir: where the files lie (cifar10: also where they are downloaded to).
        cache_dir: where imagefolder keeps its decoded pictures.
        image_size: side in pixels (imagefolder only); None: chosen from the pictures.
        on_bad: "error" or "skip", for files that are no readable image (imagefolder only).
        test_fraction: share in (0, 1) of a single tree that becomes the test set (imagefolder
            only), always the same pictures.
        workers: decoding threads; None: one per core.
        progress: show a bar on a terminal, or a plain line otherwise.

    Raises:
        UserError: the data is missing, broken or unsuitable, or a setting does not apply to it.
    """
    if name not in IMAGE_DATASETS:
        known = ", ".join(sorted(IMAGE_DATASETS))
        raise UserError(f"unknown data set {name!r}: --dataset takes one of {known}")
    if on_bad not in ("error", "skip"):
        raise UserError(f"--on_bad takes error or skip, not {on_bad!r}")
    if image_size is not None and image_size < 1:
        raise UserError(f"--image_size must be at least 1 pixel, not {image_size}")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise UserError(f"--test_fraction must lie between 0 and 1, not {test_fraction}")
    module, function = IMAGE_DATASETS[name].split(":")
    load = getattr(importlib.import_module(module), function)
    return load(
        data_dir=Path(data_dir),
        cache_dir=Path(cache_dir),
        image_size=image_size,
        on_bad=on_bad,
        test_fraction=test_fraction,
        workers=max(1, workers or os.cpu_count() or 1),
        progress=progress,
    )


def refuse_folder_settings(
    name: str, side: int, image_size: int | None, test_fraction: float | None
) -> None:
    """UserError for settings that have no effect on a set of fixed `side` with its own test set."""
    if image_size not in (None, side):
        raise UserError(
            f"--image_size {image_size} has no effect on --dataset {name}, whose pictures are "
            f"{side}x{side}: leave it out, or use --dataset imagefolder"
        )
    if test_fraction is not None:
        raise UserError(
            f"--test_fraction has no effect on --dataset {name}, which has its own test set: "
            "leave it out, or use --val_fraction for a validation split"
        )


def channel_statistics(
    images: np.ndarray | Split,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (of the population) per channel, of pixels scaled to 0..1.

    Exact: the sums of pixels and of their squares are integers, and the variance is formed from
    Python integers before the only rounding. Reads `images`, (samples, height, width, channels)
    uint8 or the pictures of a split, once, a few MiB at a time.
    """
    if not isinstance(images, Split):
        images = Split(images, np.zeros(len(images), np.int64))
    samples, channels = len(images), images.images.shape[-1]
    assert samples
    row = images.images[0].size  # height * width * channels
    # A column is summed in uint32: 65,025 * 66,051 rows are the most that cannot overflow it.
    rows = max(1, min(1 << 16, (1 << 21) // row))
    sums, squares = np.zeros(row, np.int64), np.zeros(row, np.int64)
    for chunk in images.chunks(rows):
        chunk = chunk.reshape(-1, row)  # (rows, height * width * channels)
        sums += np.add.reduce(chunk, axis=0, dtype=np.uint32)
        squared = np.multiply(chunk, chunk, dtype=np.uint16)  # 255 * 255 fits 16 bits
        squares += np.add.reduce(squared, axis=0, dtype=np.uint32)
    mean, std = [], []
    count = samples * row // channels
    for channel in range(channels):
        total = int(sums[channel::channels].sum())
        total_squares = int(squares[channel::channels].sum())
        mean.append(total / (255 * count))
        variance = (count * total_squares - total * total) / (255 * count) ** 2
        std.append(variance**0.5)
    return tuple(mean), tuple(std)


def content_fingerprint(classes: Sequence[str], splits: dict[str, Split | None]) -> str:
    """SHA-256 (hexadecimal) over class names and each split's name, shape, labels and pixels."""
    digest = hashlib.sha256(json.dumps(list(classes)).encode())
    for name, split in splits.items():
        if split is None:
            continue
        shape = [len(split), *split.images.shape[1:]]
        digest.update(json.dumps([name, shape]).encode())
        digest.update(np.ascontiguousarray(split.labels, dtype="<i8"))
        step = max(1, (1 << 22) // split.images[0].size)
        for chunk in split.chunks(step):
            digest.update(np.ascontiguousarray(chunk))
    return digest.hexdigest()
