"""Base of data sets of small pictures that are published as a few files.

Files are searched for, downloaded if absent, read into memory and compared with pinned checksums
before anything in them is unpacked.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from ...errors import UserError
from .decoded import DecodedSplit, channel_statistics
from .image_data import ImageData, PictureRequest, refuse_test_fraction

MAX_FILE_BYTES = 320 << 20  # twice the largest published one, CIFAR-100's train


class Contents(NamedTuple):
    """The data set read from the published files."""

    classes: list[str]
    train: DecodedSplit
    test: DecodedSplit
    source: Path  # where the files were found


@dataclass(frozen=True, kw_only=True)
class Published(ABC):
    """A published data set."""

    INSTEAD: ClassVar[str]  # end of an error message: what to do without the published files

    name: str  # of --dataset
    url: str
    folder: str  # that holds the files

    @property
    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """MD5 sums of the files, hexadecimal, by name."""

    @abstractmethod
    def contents(self, data_dir: Path) -> Contents:
        """Reads the files in `data_dir`, to which absent ones are downloaded.

        Raises:
            UserError: a download failed, or a file differs from the published one.
        """

    def load(self, request: PictureRequest) -> ImageData:
        """`contents` says where the files are searched for, and what it raises."""
        refuse_test_fraction(self.name, request)
        classes, train, test, source = self.contents(request.data_dir)
        checksums = json.dumps(sorted(self.checksums.items()))
        fingerprint = hashlib.sha256(checksums.encode()).hexdigest()
        statistics = channel_statistics(train.images)
        return ImageData(self.name, classes, *statistics, train, test, fingerprint, str(source))

    def read_file(self, path: Path) -> bytes:
        """The first MAX_FILE_BYTES of a file. Raises UserError if it cannot be read."""
        try:
            with open(path, "rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; {self.INSTEAD}") from error

    def broken(self, path: Path, reason: str) -> UserError:
        """The error to raise for a file that is not as published."""
        reason = " ".join(reason.split())
        return UserError(
            f"{path} is damaged ({reason}): delete it to download it again, or {self.INSTEAD}"
        )


def md5(content: bytes) -> str:
    """Hexadecimal."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
