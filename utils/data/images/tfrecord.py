"""TFRecords of encoded pictures: framing, and the few fields of tf.train.Example that matter.

A record is its length (8 bytes), the masked CRC-32C of that, the content, and its masked CRC-32C.
The content is a protobuf message tf.train.Example with `image/encoded` and `image/class/label`.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ...errors import UserError
from ...files import reason
from ...machine.packages import require
from .decode import raise_transient, why
from .records import RECORD, File
from .scanning import Bad, Scanned, entry

ENCODED, LABEL = b"image/encoded", b"image/class/label"
HEADER, FOOTER = 12, 4  # bytes


@dataclass(frozen=True)
class TFRecordShard:
    """A file of records."""

    files: list[File]  # a single one
    labels = None

    def scan(self, root: str, thorough: bool) -> Scanned:
        path = os.path.join(root, self.files[0].path)
        table, bad = [], []
        try:
            with open(path, "rb") as file:
                for offset, content, damaged in records(file, path):
                    where = f"{path}, record at byte {offset}"
                    try:
                        if damaged:
                            raise ValueError("its checksum is wrong")
                        start, end, label = find_picture(content)
                        picture = io.BytesIO(content[start:end])
                        measured = entry(picture, end - start, thorough)
                        place = offset + HEADER + start
                        table.append((0, place, end - start, label, *measured))
                    except Exception as error:  # Pillow may raise any
                        raise_transient(where, error)
                        bad.append(Bad(where, why(error)))
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
        return Scanned(np.array(table, RECORD), bad)


def records(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes, bool]]:
    """(offset of the record, content, whether its checksum is wrong) of each record.

    Raises UserError if the file was cut short, or is no TFRecord.
    """
    masked_crc, offset = checksum(), 0
    size = os.fstat(file.fileno()).st_size
    while header := file.read(HEADER):
        where = f"{path}, record at byte {offset}"
        length, check = struct.unpack("<QI", header.ljust(HEADER, b"\0"))
        if len(header) == HEADER and masked_crc(header[:8]) != check:
            what = (
                "is not a TFRecord" if offset == 0 else "is damaged: a length's checksum is wrong"
            )
            raise UserError(f"{where if offset else path} {what}; fetch the file again")
        if len(header) < HEADER or offset + HEADER + length + FOOTER > size:
            raise UserError(f"{where} was cut short: fetch the file again")
        content = file.read(length)
        (check,) = struct.unpack("<I", file.read(FOOTER))
        yield offset, content, masked_crc(content) != check
        offset += HEADER + length + FOOTER


def checksum() -> Callable[[bytes], int]:
    """The function that computes the checksums: CRC-32C, rotated and shifted.

    Raises UserError if the package for it is missing."""
    require("--dataset tfrecord", "google-crc32c")
    from google_crc32c import value

    def masked(content: bytes) -> int:
        crc = value(content)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    return masked


# ---- tf.train.Example: Example.features (1) . feature (1), a map of names to Feature; Feature has
# bytes_list (1) or int64_list (3), whose values are in field 1 -----------------------------------


def find_picture(content: bytes) -> tuple[int, int, int]:
    """(start, end) of the encoded picture in an Example, and its label.

    Raises ValueError if the Example lacks one of them, or is not one.
    """
    features: dict[bytes, tuple[int, int]] = {}
    for _, start, end in _fields(content, 0, len(content), 1):
        for _, first, last in _fields(content, start, end, 1):
            parts = {number: (a, b) for number, a, b in _fields(content, first, last)}
            if 1 in parts and 2 in parts:
                features[content[slice(*parts[1])]] = parts[2]

    def value_of(name: bytes, kind: int) -> tuple[int, int]:
        """The place of the first one."""
        if name not in features:
            raise ValueError(f"it has no {name.decode()}")
        for _, start, end in _fields(content, *features[name], kind):
            for _, first, last in _fields(content, start, end, 1):
                return first, last
        raise ValueError(f"its {name.decode()} has no value")

    start, end = value_of(ENCODED, 1)
    label, _ = _varint(content, value_of(LABEL, 3)[0])
    if label >= 1 << 31:
        raise ValueError("its label is negative or too large")
    return start, end, label


def _fields(
    content: bytes, place: int, end: int, wanted: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of the fields of a message, or only those with the number `wanted`."""
    while place < end:
        key, start = _varint(content, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            place = _varint(content, start)[1]
        elif kind == 2:
            length, start = _varint(content, start)
            place = start + length
        elif kind in (1, 5):
            place = start + (8 if kind == 1 else 4)
        else:
            raise ValueError("it is not a tf.train.Example")
        if place > end:
            raise ValueError("it is not a tf.train.Example")
        if wanted in (None, number):
            yield number, start, place


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(content) or shift > 63:
            raise ValueError("it is not a tf.train.Example")
        byte = content[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
