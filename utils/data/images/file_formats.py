"""Which formats of picture files are read, and what helps with the others."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import stat
from collections import Counter
from collections.abc import Iterable
from typing import BinaryIO

from PIL import Image

# Pillow knows more formats; some start other programs (EPS) or are not pictures.
FORMATS = (
    *("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "QOI", "SGI"),
    *("HEIF", "TGA", "TIFF", "WEBP"),
)
# Endings of pictures that need another package, or that nothing here reads.
_HEIF, _HEIF_REMEDY = (".heic", ".heif", ".hif"), "pip install pi-heif, or convert to JPEG"
_UNREAD = (
    *(*_HEIF, ".3fr", ".arw", ".avif", ".cr2", ".cr3", ".crw", ".dcm", ".dng", ".exr", ".hdr"),
    *(".jxl", ".jxr", ".nef", ".orf", ".pef", ".psd", ".raf", ".raw", ".rw2", ".srw", ".svg"),
)


def open_image(source: str | BinaryIO) -> Image.Image:
    """Read the header of an image file. Raises OSError or ValueError for any other file. HEIC is
    read where pi-heif, an optional package, is installed."""
    # Opening a pipe would block.
    if isinstance(source, str) and not stat.S_ISREG(os.stat(source).st_mode):
        raise ValueError("not a regular file")
    return Image.open(source, formats=_known_formats())


def unread_formats(names: Iterable[str]) -> list[str]:
    """Of files that are passed over, those that are pictures in formats which are not read here,
    with what helps: "7 .heic (pip install ...)"."""
    counts = Counter(os.path.splitext(name)[1].lower() for name in names)
    return [
        f"{counts[e]:,} {e} ({_HEIF_REMEDY if e in _HEIF else 'convert to JPEG or PNG'})"
        for e in _UNREAD
        if counts[e]
    ]


@functools.cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    with contextlib.suppress(ImportError):
        import pi_heif

        pi_heif.register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.cache
def picture_endings() -> frozenset[str]:
    """ ".jpg", ".png" and so on: the endings of names of pictures that can be decoded."""
    Image.init()
    known = frozenset(ending for ending, name in Image.EXTENSION.items() if name in FORMATS)
    return known.union(_HEIF) if importlib.util.find_spec("pi_heif") else known
