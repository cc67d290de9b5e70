"""Decoded pictures: arrays of uint8, in memory or memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files import replace_file
from ..groups import Groups
from ..worker_process import is_map

if TYPE_CHECKING:
    from ..workers import WorkerPool
    from .loader import ImageLoader


Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std, per channel

# Columns are summed in uint32, which holds 255 * 255 of 66,051 rows at most.
MOST_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class DecodedSplit:
    """Decoded pictures and their classes.

    `images` may be a read-only memory map larger than memory. So a part of a split is no copy: it
    shares `images` with the whole, and `rows` are its samples.
    """

    images: np.ndarray  # (pictures, height, width, channels) uint8
    labels: np.ndarray  # (samples,) int64
    rows: np.ndarray | None = None  # (samples,) int64: indices into `images`; None: all, in order
    # (pictures, 2) int64: number of a picture's file, for `path_of`, and a sum of its pixels.
    origins: np.ndarray | None = None
    path_of: Callable[[int], str] | None = None
    groups: Groups | None = None

    def __post_init__(self) -> None:
        assert self.images.ndim == 4 and self.images.dtype == np.uint8
        samples = self.images.shape[:1] if self.rows is None else self.rows.shape
        assert self.labels.shape == samples and self.labels.dtype == np.int64
        assert self.rows is None or self.rows.dtype == np.int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a picture: height, width, channels."""
        return self.images.shape[1:]

    encoded = False

    @property
    def on_disk(self) -> bool:
        """Whether reading a picture may wait for a disk."""
        return is_map(self.images)

    def part(self, index: np.ndarray) -> DecodedSplit:
        """The samples `index` (n,) int64 of this split, in that order; no picture is copied."""
        rows = index if self.rows is None else self.rows[index]
        groups = self.groups and self.groups.part(index)
        return replace(self, labels=self.labels[index], rows=rows, groups=groups)

    def picture(self, row: int) -> np.ndarray:
        return self.images[row]

    def file(self, row: int) -> str:
        return self.path_of(self.origins[row, 0])

    def name(self, sample: int) -> str | None:
        """The file of a sample; None: the pictures do not lie in files of their own."""
        if self.path_of is None or self.origins is None:
            return None
        return self.file(sample if self.rows is None else int(self.rows[sample]))

    def chunks(self, samples: int) -> Iterator[np.ndarray]:
        """The pictures in order, (up to `samples`, height, width, channels) uint8 at a time."""
        for start in range(0, len(self), samples):
            piece = slice(start, start + samples)
            yield self.images[piece if self.rows is None else self.rows[piece]]

    def loader(self, *, pool: WorkerPool | None = None, **options) -> ImageLoader:
        """Batches of these pictures; `pool` is used only if they are on disk."""
        from .loader import ImageLoader  # PyTorch takes seconds

        pool = pool if self.on_disk else None
        return ImageLoader(self.images, self.labels, rows=self.rows, pool=pool, **options)


def channel_statistics(images: np.ndarray | DecodedSplit) -> Statistics:
    """Mean and standard deviation (of the population) per channel, of pixels scaled to 0..1.

    Reads `images`, (samples, height, width, channels) uint8 or a split, once, a few MiB at a time.
    """
    if not isinstance(images, DecodedSplit):
        images = DecodedSplit(images, np.zeros(len(images), np.int64))
    row = images.images[0].size  # height * width * channels
    return statistics_of(images.chunks(max(1, min(MOST_ROWS, (1 << 21) // row))))


def statistics_of(chunks: Iterable[np.ndarray]) -> Statistics:
    """The same of pictures that come in chunks, (up to MOST_ROWS, height, width, channels) uint8.

    The sums of pixels and of their squares are exact integers; only the final divisions and the
    square root round. So they do not depend on how the pictures are cut into chunks.
    """
    samples, sums, squares = 0, np.zeros((), np.int64), np.zeros((), np.int64)
    for chunk in chunks:
        channels, row = chunk.shape[-1], chunk[0].size
        chunk = chunk.reshape(-1, row)  # (rows, height * width * channels)
        samples += len(chunk)
        sums = sums + np.add.reduce(chunk, axis=0, dtype=np.uint32).astype(np.int64)
        squared = np.multiply(chunk, chunk, dtype=np.uint16)  # 255 * 255 fits 16 bits
        squares = squares + np.add.reduce(squared, axis=0, dtype=np.uint32).astype(np.int64)
    assert samples
    mean, std = [], []
    count = samples * row // channels
    for channel in range(channels):
        total = int(sums[channel::channels].sum())
        total_squares = int(squares[channel::channels].sum())
        mean.append(total / (255 * count))
        variance = (count * total_squares - total * total) / (255 * count) ** 2
        std.append(variance**0.5)
    return tuple(mean), tuple(std)


def kept_statistics(folder: Path, key: str, compute: Callable[[], Statistics]) -> Statistics:
    """Those that an earlier run has left in the folder of a cache, else new ones, which are left
    there if it can be written.

    Args:
        key: SHA-256 (hexadecimal) of what they depend on.
    """
    return kept(
        folder / f"statistics-{key[:16]}.json",
        lambda: dict(zip(("mean", "std"), compute(), strict=True)),
        lambda found: (tuple(found["mean"]), tuple(found["std"])),
    )


def kept(path: Path, compute: Callable[[], Any], read: Callable[[Any], Any] = list) -> Any:
    """`read` of the JSON that an earlier run has left in the file, else of what is computed, which
    is left there if it can be written."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return read(json.loads(path.read_text(encoding="utf-8")))
    found = compute()
    with suppress(OSError):  # then it is computed again
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(found).encode())
    return read(found)


def content_fingerprint(classes: Sequence[str], splits: dict[str, DecodedSplit | None]) -> str:
    """SHA-256 (hexadecimal) of the class names and each split's name, shape, labels and pixels."""
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
