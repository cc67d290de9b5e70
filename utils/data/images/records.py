"""Encoded pictures in files, found by an index that is memory-mapped.

Worker processes import this file. It needs PyTorch for resized crops alone.
"""

from __future__ import annotations

import functools
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError
from ...files import reason
from .decode import (
    decode,
    decode_window,
    not_readable,
    raise_transient,
    strict_pillow,
    why,
)
from .image_data import USUAL, Form

# A record: where it is, its class, and the size of the upright picture. `check` is the CRC-32 of
# the first HEAD bytes, for the data set's fingerprint.
RECORD = np.dtype(
    [
        *(("file", "<i4"), ("offset", "<i8"), ("length", "<i8"), ("label", "<i4")),
        *(("height", "<i4"), ("width", "<i4"), ("check", "<u4")),
    ]
)
HEAD = 4096


class File(NamedTuple):
    """A file with pictures, and what tells that it has changed."""

    path: str  # relative to the data set's root, or absolute
    size: int  # bytes; -1: it is not there
    modified: int  # ns

    @classmethod
    def at(cls, root: str | Path, path: str) -> File:
        state = os.stat(os.path.join(root, path))
        return cls(path, state.st_size, state.st_mtime_ns)


@dataclass(frozen=True)
class Records:
    """The records of one split, as an index in `folder` lists them.

    Pickled without the maps, which each process opens for itself.

    Args:
        root: what the names of the files are relative to.
        folder: of the index (record_index.py).
        split: its name.
    """

    root: str
    folder: str
    split: str

    @functools.cached_property
    def table(self) -> np.ndarray:
        """(records,) RECORD."""
        return self._map(f"{self.split}.npy")

    @functools.cached_property
    def files(self) -> np.ndarray:
        """(files,): name (bytes), size, modified."""
        return self._map(f"{self.split}_files.npy")

    def __getstate__(self) -> dict:
        return {"root": self.root, "folder": self.folder, "split": self.split}

    def __len__(self) -> int:
        return len(self.table)

    def path(self, file: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.files["name"][file]))

    def describe(self, record: int) -> str:
        """The record, for messages."""
        found = self.table[record]
        path = self.path(found["file"])
        # A record that begins at 0 is a whole file: shards begin with a header.
        return f"{path}, byte {found['offset']}" if found["offset"] else path

    def read(self, record: int) -> bytes:
        """Raises UserError if the file has changed or cannot be read."""
        found = self.table[record]
        file, offset, length = (int(found[key]) for key in ("file", "offset", "length"))
        indexed = self.files[file]
        try:
            with open(self.path(file), "rb", buffering=0) as opened:
                state = os.fstat(opened.fileno())
                content = os.pread(opened.fileno(), length, offset)
        except OSError as error:
            raise UserError(f"cannot read {self.path(file)}: {reason(error)}") from error
        unchanged = (state.st_size, state.st_mtime_ns) == (indexed["size"], indexed["modified"])
        if not unchanged or len(content) < length:
            raise UserError(
                f"{self.path(file)} was changed after its pictures were indexed: start again with "
                "--resume, and leave the files alone meanwhile"
            )
        return content

    def _map(self, name: str) -> np.ndarray:
        path = Path(self.folder) / name
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the index {path}: {error}") from error


@dataclass(frozen=True)
class EncodedPictures:
    """Records, as the augmentation sees them.

    Args:
        size: side of the decoded pictures.
        form: how a file becomes a picture.
    """

    records: Records
    size: int
    form: Form = USUAL

    def sizes(self, index: np.ndarray) -> np.ndarray:
        """(n, 2) int64: height and width of the pictures `index` (n,), undiminished, in which
        windows are drawn."""
        found = self.records.table[index]
        sizes = np.stack([found["height"], found["width"]], 1).astype(np.int64)
        return (
            sizes if self.form.resize_mode == "crop" else np.repeat(sizes.max(1), 2).reshape(-1, 2)
        )

    def decode(
        self,
        index: np.ndarray,
        windows: np.ndarray | None = None,
        flips: np.ndarray | None = None,
    ) -> np.ndarray:
        """The pictures `index` (n,) as (n, size, size, 3) uint8. To be called within
        `strict_pillow`.

        Args:
            windows: (n, 4) int64, as in `decode_window`; None: the central squares.
            flips: (n,), 1: mirrored; with `windows` alone.

        Raises:
            UserError: a record cannot be read or decoded.
        """
        out = np.empty((len(index), self.size, self.size, 3), np.uint8)
        for place, record in enumerate(index.tolist()):
            content = self.records.read(record)
            if windows is None:
                out[place] = self.decode_one(record, content)
            else:
                out[place] = self.decode_one(record, content, windows[place], bool(flips[place]))
        return out

    def decode_one(
        self,
        record: int,
        content: bytes,
        window: np.ndarray | None = None,
        mirrored: bool = False,
    ) -> np.ndarray:
        """The picture whose bytes are `content`, (size, size, 3) uint8; else as `decode`."""
        try:
            if window is None:
                return decode(io.BytesIO(content), self.size, self.form)
            return decode_window(io.BytesIO(content), window, mirrored, self.size, self.form)
        except Exception as error:  # a damaged file can make Pillow raise any exception
            raise_transient(self.records.describe(record), error)
            raise not_readable(self.records.describe(record), why(error)) from error


@dataclass(frozen=True)
class RecordReader:
    """Decodes and augments pictures, in this process or in a worker (see worker_process.py)."""

    pictures: EncodedPictures
    augment: Any  # as in loader.py, or None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        size = self.pictures.size
        return len(self.pictures.records), size, size, 3

    def open(self) -> Any:
        return self.pictures

    def read(self, opened: EncodedPictures, rows: np.ndarray, plan: Any, out: np.ndarray) -> None:
        out[:] = self.pictures_of(opened, rows, plan)

    def pictures_of(self, opened: EncodedPictures, rows: np.ndarray, plan: Any) -> np.ndarray:
        """What `read` writes."""
        with strict_pillow():
            if plan is None:
                return opened.decode(rows)
            if self.augment.reads_encoded:
                return self.augment.apply(opened, plan, rows)
            return self.augment.apply(opened.decode(rows), plan, np.arange(len(rows)))
