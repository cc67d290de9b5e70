"""Sources of pictures: the table of data sets, and what each of them gives.

A data set is one module in this folder and one line in `IMAGE_DATASETS`, which names a
`PictureSource`. It gives its pictures as any kind of `PictureSplit`: today as decoded arrays (see
decoded.py).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from utils.data.loader import Loader
    from utils.data.workers import WorkerPool

# Name -> "module:function", imported on use: `--dataset shapes` needs no decoder, `--help` nothing.
IMAGE_DATASETS = {
    "cifar10": "utils.data.images.cifar:load_cifar10",
    "cifar100": "utils.data.images.cifar:load_cifar100",
    "fashion_mnist": "utils.data.images.mnist:load_fashion_mnist",
    "imagefolder": "utils.data.images.imagefolder:load_imagefolder",
    "mnist": "utils.data.images.mnist:load_mnist",
    "shapes": "utils.data.images.shapes:load_shapes",
}


class PictureSplit(Protocol):
    """Pictures and their classes: what tasks ask of them, whatever kind they are kept as."""

    @property
    def labels(self) -> np.ndarray:
        """(samples,) int64, each below the number of classes."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a picture in a batch, uint8: height, width (in pixels), channels."""

    @property
    def on_disk(self) -> bool:
        """Whether reading a picture may wait for a disk, which reading processes can do ahead."""

    def __len__(self) -> int:
        """Samples."""

    def part(self, index: np.ndarray) -> PictureSplit:
        """The samples `index` (n,) int64 of this split, in that order; no picture is copied."""

    def loader(self, *, pool: WorkerPool | None = None, **options) -> Loader:
        """Batches of these pictures, read by the processes of `pool` where that is of use.

        Args:
            options: those of ImageLoader (see loader.py) but for the pictures themselves.
        """


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
    train: PictureSplit
    test: PictureSplit
    fingerprint: str
    source: str
    val: PictureSplit | None = None
    synthetic: bool = False
    skipped: int = 0


class PictureSource(Protocol):
    """What a line of `IMAGE_DATASETS` names. The arguments are those of `load_image_data`; a source
    refuses what would have no effect on it (see `refuse_folder_settings`).
    """

    def __call__(
        self,
        *,
        data_dir: Path,
        cache_dir: Path,
        image_size: int | None,
        on_bad: str,
        test_fraction: float | None,
        workers: int,
        progress: bool,
    ) -> ImageData: ...


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
        test_fraction: fraction, in (0, 1), of a single tree that becomes the test set (imagefolder
            only); always the same pictures.
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
    load: PictureSource = getattr(importlib.import_module(module), function)
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
