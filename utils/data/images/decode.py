"""Decodes image files of many formats to RGB pictures of one size."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

# Pillow knows more formats; some start other programs (EPS) or are not pictures.
FORMATS = (
    *("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "QOI", "SGI"),
    *("TGA", "TIFF", "WEBP"),
)
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_image(path: str) -> Image.Image:
    """Read the header of an image file. Raises OSError or ValueError for any other file."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
        raise ValueError("not a regular file")
    return Image.open(path, formats=_known_formats())


def decode(path: str, size: int) -> np.ndarray:
    """The picture as (size, size, 3) uint8 RGB: turned as its EXIF orientation says, its central
    square resized bicubically.

    Of an animation the first frame is decoded. Transparency is dropped (as in torchvision), 16-bit
    gray is scaled to 8 bits. Raises any of Pillow's exceptions for a damaged file, ValueError for
    pixels without a known range.
    """
    with open_image(path) as image:
        # Decoding at 1/2, 1/4 or 1/8 is faster; no side shrinks below twice `size`.
        if image.format == "JPEG":
            image.draft(None, (2 * size, 2 * size))
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        image = to_rgb(image)
        if turn is not None:
            image = image.transpose(turn)
    width, height = image.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.asarray(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded picture of any mode as 8-bit RGB."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow may keep in 32 ("I")
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("32-bit pixels, which have no known range")
        image = Image.fromarray(((pixels + 128) // 257).astype(np.uint8))  # 65535 -> 255
    elif image.mode == "F":
        raise ValueError("floating-point pixels, which have no known range")
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA")  # applies the palette
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # damaged EXIF does not mean that the picture is damaged
        return 1


@functools.cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.cache
def picture_endings() -> frozenset[str]:
    """ ".jpg", ".png" and so on: the endings of names of pictures that can be decoded."""
    Image.init()
    return frozenset(ending for ending, name in Image.EXTENSION.items() if name in FORMATS)


def decode_all(
    paths: list[str], size: int, workers: int
) -> Iterator[tuple[np.ndarray, dict[int, str]]]:
    """Decode files in `workers` threads, a chunk in each; Pillow releases the GIL.

    Yields in order, for each chunk, the decoded pictures, (n, size, size, 3) uint8, and for files
    that cannot be decoded: offset in the chunk -> reason. A few more than `workers` chunks, of
    about 8 MiB at most, are in memory.
    """
    length = max(1, min(256, (8 << 20) // (3 * size * size)))

    def decode_chunk(chunk: list[str]) -> tuple[np.ndarray, dict[int, str]]:
        pictures, errors = np.empty((len(chunk), size, size, 3), np.uint8), {}
        good = 0
        for offset, path in enumerate(chunk):
            try:
                pictures[good] = decode(path, size)
                good += 1
            except Exception as error:  # a damaged file can make Pillow raise any exception
                text = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if isinstance(error, Image.UnidentifiedImageError):
                    text = "not an image of a known format"
                errors[offset] = " ".join(text.split())
        return pictures[:good], errors

    chunks = (paths[start : start + length] for start in range(0, len(paths), length))
    pending: deque = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        for chunk in chunks:
            pending.append(pool.submit(decode_chunk, chunk))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Makes Pillow's warning of a too large picture an error, and hides its other warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
