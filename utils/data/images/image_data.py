"""What is asked of a data set of pictures, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import UserError
from ...machine.cores import usable_cores

if TYPE_CHECKING:
    import numpy as np

    from ..loader import Loader
    from ..workers import WorkerPool

# What was done before there was a choice of form; caches of that keep their keys.
_BEFORE = ["crop", "dropped", 65535]


@dataclass(frozen=True)
class Form:
    """How the file of a picture becomes a square of 8-bit RGB: the same in training, evaluation and
    prediction.

    Args:
        resize_mode: "crop", the central square; "squash", the whole picture, whose sides are
            resized independently; "letterbox", the whole picture between gray bars.
        crop_ratio: side of the central square, as a fraction of the shorter side.
        transparency: "white" or "black", what transparent pictures are laid on; "dropped", their
            colours as they are stored.
        white_level: the value of 16-bit pictures that becomes white.
    """

    resize_mode: str = "crop"
    crop_ratio: float = 1.0
    transparency: str = "white"
    white_level: int = 65535

    def key(self, of_jpegs: bool = False) -> list:
        """For the keys of caches, without `crop_ratio`. JPEGs are neither transparent nor of 16
        bits."""
        values = [self.resize_mode, *([] if of_jpegs else [self.transparency, self.white_level])]
        return [] if values == _BEFORE[: len(values)] else values


USUAL = Form()


@dataclass(frozen=True)
class PictureRequest:
    """How a data set of pictures is loaded.

    Args:
        data_dir: folder of the files, and of the downloads of published data sets.
        cache_dir: folder of decoded and resized pictures and of indices.
        image_size: side in pixels; None: that of the data set, or chosen from the user's own
            pictures.
        workers: how many pictures or files are read, decoded or resized at once; None: one per
            core.
        progress: show a bar on a terminal, or a plain line otherwise.

    These have an effect on pictures of the user's own only:
        on_bad: "error" or "skip", for files that cannot be decoded.
        test_fraction: fraction, in (0, 1), of the pictures that becomes the test set if they have
            none, always the same pictures; None: TEST_FRACTION of a folder or list.
        decode: "once", into the cache; "always", while training; "auto", by their size. Shards are
            always decoded while training.
        form: how a file becomes a picture; with "once" its `crop_ratio` is 1.
        group_by: how names of files tell which belong together (`groups_of_files`); None: they do
            not, but a note points out names that look so, where pictures are divided.
        val_fraction: that the caller holds out of the training pictures.
        classes: of a trained model; all labelled pictures of an imagefolder, or of a list, are then
            both `train` and `test`.

    These on lists alone:
        group_column: name or number of the column with the group, instead of `group_by`.
        encoding: of lists that are not UTF-8.
        image_column, label_column: names or numbers (from 1); None: found where there is no doubt.
        image_dir: of the pictures, relative to the folder of the lists; None likewise.
    """

    data_dir: Path
    cache_dir: Path
    image_size: int | None = None
    on_bad: str = "error"
    test_fraction: float | None = None
    decode: str = "once"
    form: Form = USUAL
    workers: int | None = None
    progress: bool = True
    classes: list[str] | None = None
    encoding: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    image_dir: str | None = None
    group_column: str | None = None
    group_by: str | None = None
    val_fraction: float = 0.0

    @property
    def threads(self) -> int:
        return max(1, usable_cores() if self.workers is None else self.workers)


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

    @property
    def rows(self) -> np.ndarray | None:
        """(samples,) int64: where they are in the split that this is a part of; None: all, in
        order."""

    def __len__(self) -> int:
        """Samples."""

    def picture(self, row: int) -> np.ndarray:
        """(height, width, channels) uint8; `row` as in `rows`."""

    def name(self, sample: int) -> str | None:
        """For the user; None: it has none."""

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


class NoTestSet(UserError):
    """There is no test set, and no fraction of the pictures that becomes one."""


def refuse_test_fraction(name: str, request: PictureRequest) -> None:
    """Raises UserError for a `test_fraction` of the data set `name`, which has its own test set."""
    if request.test_fraction is not None:
        raise UserError(
            f"--test_fraction has no effect on --dataset {name}, which has its own test set: "
            "leave it out, or use --val_fraction for a validation split"
        )
