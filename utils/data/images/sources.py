"""Sources of pictures: the table of data sets, and the interfaces that they implement.

A data set is a module in this folder with a `PictureSource`, and a line in `IMAGE_DATASETS`. Its
splits may be any kind of `PictureSplit`; those here are decoded arrays (decoded.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from utils.data.images.form import USUAL, Form
from utils.errors import UserError
from utils.machine.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from utils.data.loader import Loader
    from utils.data.workers import WorkerPool

# Name -> "module:function", imported on use: `--dataset shapes` needs no decoder, `--help` nothing.
IMAGE_DATASETS = {
    "cifar10": "utils.data.images.cifar:load_cifar10",
    "cifar100": "utils.data.images.cifar:load_cifar100",
    "csv": "utils.data.images.csv_lists:load_csv",
    "fashion_mnist": "utils.data.images.mnist:load_fashion_mnist",
    "imagefolder": "utils.data.images.imagefolder:load_imagefolder",
    "mnist": "utils.data.images.mnist:load_mnist",
    "parquet": "utils.data.images.parquet:load_parquet",
    "shapes": "utils.data.images.shapes:load_shapes",
    "tar": "utils.data.images.shards:load_tar",
    "tfrecord": "utils.data.images.shards:load_tfrecord",
}


# Of an imagefolder or csv without a test set, if --test_fraction does not say. Shards without one
# may have names that are not understood, so that they need the flag.
TEST_FRACTION = 0.2


class NoTestSet(UserError):
    """There is no test set, and no fraction of the pictures that becomes one."""


class PictureSplit(Protocol):
    """Pictures and their classes, however they are stored."""

    @property
    def labels(self) -> np.ndarray:
        """(samples,) int64, each below the number of classes."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the uint8 pictures in a batch."""

    @property
    def on_disk(self) -> bool:
        """Whether reading a picture may wait for a disk; worker processes can read ahead then."""

    @property
    def encoded(self) -> bool:
        """Whether a picture is decoded each time that it is read, for which worker processes
        pay."""

    def __len__(self) -> int:
        """Samples."""

    def part(self, index: np.ndarray) -> PictureSplit:
        """The samples `index` (n,) int64 of this split, in that order; no picture is copied."""

    def loader(self, *, pool: WorkerPool | None = None, **options) -> Loader:
        """Batches of these pictures, read by the processes of `pool` if that is faster.

        Args:
            options: those of ImageLoader (loader.py), except `images`, `labels` and `rows`.
        """


@dataclass(frozen=True, eq=False)
class ImageData:
    """A whole data set.

    `mean` and `std` are per channel, of pixels scaled to 0..1, from the training pictures only.
    `fingerprint` is a SHA-256 (hexadecimal) that changes with pixels, labels and class names. `val`
    is None unless the data set has its own validation split. `skipped` counts the files left out by
    `on_bad="skip"`; `source` says, for messages, where the pictures came from. `val_is_test`:
    `test` is the split named val. `notes`: lines for the user, on what is lost of the pictures.
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
    notes: Sequence[str] = ()
    val_is_test: bool = False


class PictureSource(Protocol):
    """A function in `IMAGE_DATASETS`, with the arguments of `load_image_data`.

    It raises UserError for settings without effect on it (see `refuse_test_fraction`). Decoded
    pictures of another size than `image_size` are resized afterwards (resized.py).
    """

    def __call__(self, *, data_dir: Path, cache_dir: Path, **settings) -> ImageData: ...


def load_image_data(
    name: str,
    *,
    data_dir: str | Path,
    cache_dir: str | Path,
    image_size: int | None = None,
    on_bad: str = "error",
    test_fraction: float | None = None,
    decode: str = "once",
    form: Form = USUAL,
    workers: int | None = None,
    progress: bool = True,
    encoding: str | None = None,
    classes: Sequence[str] | None = None,
    **lists: str | None,
) -> ImageData:
    """Load the data set `name` of `IMAGE_DATASETS`.

    Args:
        data_dir: folder of the files, and of the downloads of published data sets.
        cache_dir: folder of decoded and resized pictures and of indices.
        image_size: side in pixels; None: that of the data set, or chosen from the user's own
            pictures.

    These have an effect on pictures of the user's own only:
        on_bad: "error" or "skip", for files that cannot be decoded.
        test_fraction: fraction, in (0, 1), of the pictures that becomes the test set if they have
            none, always the same pictures; None: TEST_FRACTION of a folder or list.
        decode: "once", into the cache; "always", while training; "auto", by their size. Shards are
            always decoded while training.
        form: how a file becomes a picture; with "once" its `crop_ratio` is 1.
        workers: threads that decode or resize; None: one per core.
        progress: show a bar on a terminal, or a plain line otherwise.
        encoding: of lists that are not UTF-8.
        classes: of a trained model; all labelled pictures of an imagefolder, or of a list, are then
            both `train` and `test`.
        lists: `image_column`, `label_column` and `image_dir` of `load_csv`.

    Raises:
        UserError: the data is missing, damaged or unsuitable, or a setting does not apply to it.
    """
    module, function = IMAGE_DATASETS[name].split(":")
    load: Callable[..., ImageData] = getattr(importlib.import_module(module), function)
    workers = max(1, usable_cores() if workers is None else workers)
    load = partial(
        load,
        data_dir=Path(data_dir),
        cache_dir=Path(cache_dir),
        image_size=image_size,
        on_bad=on_bad,
        decode=decode,
        form=form,
        workers=workers,
        progress=progress,
        **({"encoding": encoding, **lists} if name == "csv" else {}),
        **({} if classes is None else {"classes": list(classes)}),
    )
    try:
        data = load(test_fraction=test_fraction)
    except NoTestSet:
        data = load(test_fraction=TEST_FRACTION)
        held_out = "a fifth is held out as test set (--test_fraction sets another part)"
        data = replace(data, source=f"{data.source}; {held_out}")
    if image_size in (None, data.train.shape[0]):
        return data
    from utils.data.images.resized import resized  # it imports this file

    return resized(data, image_size, Path(cache_dir), workers=workers, progress=progress)


def refuse_test_fraction(name: str, test_fraction: float | None) -> None:
    """Raises UserError for a `test_fraction` of the data set `name`, which has its own test set."""
    if test_fraction is not None:
        raise UserError(
            f"--test_fraction has no effect on --dataset {name}, which has its own test set: "
            "leave it out, or use --val_fraction for a validation split"
        )
