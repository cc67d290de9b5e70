"""Data sets of decoded pictures at another size than their own: `--image_size`.

Resized once into a cache (cache.py), as decoded files are. Its key depends on the data set's
fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from utils.data.images.cache import VERSION, build_cache, open_cache
from utils.data.images.sources import ImageData
from utils.data.images.threads import in_threads

CHUNK = 1 << 20  # bytes of resized pictures that a thread makes at once


@dataclass(frozen=True)
class ArraySource:
    """Decoded pictures of one split; a Source of cache.py."""

    split: Any  # a DecodedSplit
    verb = "resizing"

    @property
    def labels(self) -> np.ndarray:
        return self.split.labels

    @property
    def channels(self) -> int:
        return self.split.shape[2]

    def describe(self, picture: int) -> str:
        return f"picture {picture}"

    def decoded(self, size: int, workers: int) -> Generator[tuple[np.ndarray, dict[int, str]]]:
        pictures = max(1, CHUNK // (self.channels * size * size))
        chunks = self.split.chunks(pictures)
        return in_threads(lambda chunk: (resize(chunk, size), {}), chunks, workers, "resize")


def resized(
    data: ImageData, size: int, cache_dir: Path, *, workers: int, progress: bool
) -> ImageData:
    """The data set with pictures of (size, size) pixels, memory-mapped.

    Raises UserError if the cache cannot be written.
    """
    what = json.dumps([VERSION, "resized", data.fingerprint, size])
    folder = cache_dir / hashlib.sha256(what.encode()).hexdigest()
    splits = {"train": data.train, "val": data.val, "test": data.test}
    index, cached = open_cache(folder) or build_cache(
        folder,
        {name: ArraySource(split) for name, split in splits.items() if split is not None},  # type: ignore[misc]  # it is frozen
        data.classes,
        image_size=size,
        on_bad="error",
        workers=workers,
        progress=progress,
    )
    return replace(
        data,
        mean=index.mean,
        std=index.std,
        fingerprint=index.fingerprint,
        source=f"{data.source}, resized to {size}x{size} in {folder}",
        **cached,  # type: ignore[arg-type]  # splits by name
    )


def resize(pictures: np.ndarray, size: int) -> np.ndarray:
    """(n, height, width, channels) uint8 -> (n, size, size, channels) uint8: bicubic, antialiased,
    as `decode` resizes files."""
    n, channels = len(pictures), pictures.shape[3]
    out = np.empty((n, size, size, channels), np.uint8)
    for place, picture in enumerate(pictures):
        image = Image.fromarray(picture[..., 0] if channels == 1 else picture)
        found = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))
        out[place] = found.reshape(size, size, channels)
    return out
