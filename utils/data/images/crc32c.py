"""CRC-32C (Castagnoli), of TFRecords: by the package google-crc32c if it is installed.

CRCs are linear: that of a record is the exclusive or of what each of its bytes adds, by its
distance from the end. NumPy looks these up for a block of bytes at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

POLYNOMIAL = 0x82F63B78  # of Castagnoli, bits reversed
BLOCK = 256  # bytes


@functools.cache
def crc32c() -> Callable[[bytes], int]:
    """The function that computes it."""
    try:
        from google_crc32c import value
    except ImportError:
        return plain_crc32c
    return value


def plain_crc32c(data: bytes) -> int:
    if len(data) < 4:
        return _bytewise(data)
    start, steps = _tables()
    filled = np.zeros(-(-len(data) // BLOCK) * BLOCK, np.uint8)  # zeros in front change nothing
    filled[-len(data) :] = np.frombuffer(data, np.uint8)
    # A CRC begins with all bits set, which is as if its first four bytes were inverted.
    filled[len(filled) - len(data) :][:4] ^= 0xFF
    places = filled.reshape(-1, BLOCK) + np.arange(0, 256 * BLOCK, 256, dtype=np.int32)
    blocks = np.bitwise_xor.reduce(start[places], axis=1)  # the CRC of each block alone
    one, two, three, four = steps
    crc = 0
    for block in blocks.tolist():
        crc = (
            one[crc & 255] ^ two[crc >> 8 & 255] ^ three[crc >> 16 & 255] ^ four[crc >> 24] ^ block
        )
    return crc ^ 0xFFFFFFFF


def _bytewise(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _bits(crc ^ byte)
    return crc ^ 0xFFFFFFFF


def _bits(crc: int) -> int:
    """A byte further."""
    for _ in range(8):
        crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return crc


@functools.cache
def _tables() -> tuple[np.ndarray, list[list[int]]]:
    """What each byte of a block adds, (BLOCK * 256,) uint32 by place and value; and what each of
    the four bytes of a CRC becomes a block later."""
    table = np.array([_bits(value) for value in range(256)], np.uint32)
    rows = [table]
    for _ in range(BLOCK - 1):  # a place further from the end
        rows.append(table[rows[-1] & 255] ^ rows[-1] >> np.uint32(8))
    # A block later, a byte of the CRC has gone through all its places.
    steps = [row.tolist() for row in (rows[BLOCK - 1], *rows[BLOCK - 2 : BLOCK - 5 : -1])]
    return np.concatenate(rows[::-1]), steps
