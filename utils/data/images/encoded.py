"""Encoded pictures as a split: decoded while training, never all at once."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from utils.data.images.records import EncodedPictures

if TYPE_CHECKING:
    from utils.data.images.loader import EncodedLoader
    from utils.data.workers import WorkerPool


@dataclass(frozen=True, eq=False)
class EncodedSplit:
    """Encoded pictures and their classes. A part of a split shares `pictures` with the whole."""

    pictures: EncodedPictures
    labels: np.ndarray  # (samples,) int64
    rows: np.ndarray | None = None  # (samples,) int64: of the records; None: all, in order

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
        return EncodedSplit(self.pictures, self.labels[index], rows)

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

    def resized(self, size: int) -> EncodedSplit:
        """The same samples, decoded to another size."""
        return replace(self, pictures=replace(self.pictures, size=size))

    def loader(self, *, pool: WorkerPool | None = None, **options) -> EncodedLoader:
        """Batches of these pictures, decoded by the processes of `pool`, if there is one."""
        from utils.data.images.loader import EncodedLoader  # PyTorch takes seconds

        return EncodedLoader(self.pictures, self.labels, rows=self.rows, pool=pool, **options)
