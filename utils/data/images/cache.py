"""Decoded pictures of one size on disk: written once, memory-mapped by every later run.

A cache is a folder `<cache_dir>/<key>/` with `<split>.npy`, `<split>_labels.npy` and
`index.json`. It is built under a temporary name, flushed to disk and renamed, so that it is
complete or absent even if a process is killed or several build the same cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import UserError
from ...files import write_synced
from ...plural import counted
from ..cache_folder import built, require_space, write_array
from ..progress import progress_bar
from .decode import decode_all, in_threads, strict_pillow, unreadable
from .decoded import DecodedSplit, channel_statistics, content_fingerprint
from .image_data import Form, ImageData, PictureRequest

VERSION = 1  # of decoding and of the cache's layout; part of every key


@dataclass(frozen=True)
class Source:
    """The pictures of one split, from which a cache is built.

    Args:
        verb: what is done with them, for messages.
        labels: indices into the classes, one for each picture.
        describe: names a picture, for messages.
        decoded: (size, workers) -> the pictures in order, in chunks: those that are good, (n, size,
            size, channels) uint8, and for the others: offset in the chunk -> reason.
    """

    verb: str
    labels: Sequence[int] | np.ndarray
    channels: int
    describe: Callable[[int], str]
    decoded: Callable[[int, int], Generator[tuple[np.ndarray, dict[int, str]]]]


def of_files(paths: list[str], labels: list[int], form: Form) -> Source:
    def decoded(size: int, workers: int) -> Generator[tuple[np.ndarray, dict[int, str]]]:
        return decode_all(paths, size, workers, form)

    return Source("decoding", labels, 3, paths.__getitem__, decoded)


@dataclass(frozen=True)
class Index:
    """Content of `index.json`; `skipped_first`: the first skipped files, with the reasons."""

    version: int
    classes: list[str]
    image_size: int
    counts: dict[str, int]  # split -> pictures
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    skipped: int
    skipped_first: list[str]
    channels: int = 3


def open_cache(folder: Path) -> tuple[Index, dict[str, DecodedSplit]] | None:
    """Memory-map the cache at `folder`; None if it is absent, damaged or of another version."""
    try:
        raw = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        index = Index(**{**raw, "mean": tuple(raw["mean"]), "std": tuple(raw["std"])})
        splits = {}
        for name, count in index.counts.items():
            images = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            labels = np.load(folder / f"{name}_labels.npy", allow_pickle=False)
            if images.shape != (count, index.image_size, index.image_size, index.channels):
                return None
            if not 0 <= labels.min() <= labels.max() < len(index.classes):
                return None
            origins = None  # of an earlier version
            with contextlib.suppress(FileNotFoundError):
                origins = np.load(folder / f"{name}_origins.npy", allow_pickle=False)
            splits[name] = DecodedSplit(images, labels, origins=origins)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError):
        return None
    return (index, splits) if index.version == VERSION else None


def build_cache(
    folder: Path, sources: dict[str, Source], classes: list[str], request: PictureRequest, size: int
) -> tuple[Index, dict[str, DecodedSplit]]:
    """Decode every picture of `sources`, by split, to `size` into the cache `folder`, and map it.

    Raises:
        UserError: a picture cannot be decoded (unless `on_bad` is "skip"), no picture is left of a
            split or of a class of the training pictures, or the cache cannot be written.
    """

    def write(temporary: Path) -> None:
        pixels = sum(len(one.labels) * (one.channels * size**2 + 8) for one in sources.values())
        require_space(folder.parent, pixels, f"the cache of pictures of --image_size {size}")
        _write(temporary, sources, classes, request, size)

    return built(folder, lambda: open_cache(folder), write, "the cache of decoded pictures")


def _write(
    folder: Path, sources: dict[str, Source], classes: list[str], request: PictureRequest, size: int
) -> None:
    count, (first, *_) = sum(len(source.labels) for source in sources.values()), sources.values()
    line = f"{first.verb} {counted(count, 'picture')} to {size}x{size}, once"
    bad: list[tuple[str, str]] = []
    splits: dict[str, DecodedSplit] = {}
    with (
        progress_bar(request.progress, line, desc=first.verb, total=count, unit=" pictures") as bar,
        strict_pillow(),
    ):
        for name, source in sources.items():
            labels = np.asarray(source.labels, np.int64)
            good, sums = np.ones(len(labels), bool), []
            with (
                open(folder / f"{name}.npy", "w+b") as file,
                contextlib.closing(source.decoded(size, request.threads)) as chunks,
            ):
                # Written again at the end with the number of good pictures; NumPy pads the header,
                # so that its length stays.
                shape = (len(labels), size, size, source.channels)
                _write_header(file, shape)
                done = 0
                for pictures, errors in chunks:
                    for offset, problem in errors.items():
                        bad.append((source.describe(done + offset), problem))
                        good[done + offset] = False
                    file.write(pictures)
                    some = np.ascontiguousarray(pictures[:, :: max(1, size // 32)])
                    sums += [zlib.crc32(rows) for rows in some]
                    done += len(pictures) + len(errors)
                    bar.update(len(pictures) + len(errors))
                if bad and request.on_bad == "error":
                    continue  # other splits may have more
                _check_something_left(name, source, good, classes)
                file.seek(0)
                _write_header(file, (int(good.sum()), *shape[1:]))
                file.flush()
                os.fsync(file.fileno())
            write_array(folder / f"{name}_labels.npy", labels[good])
            origins = np.stack([np.flatnonzero(good), np.array(sums, np.int64)], 1)
            write_array(folder / f"{name}_origins.npy", origins)
            images = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            splits[name] = DecodedSplit(images, labels[good])
    if bad and request.on_bad == "error":
        raise unreadable(bad, "files")
    mean, std = channel_statistics(next(iter(splits.values())).images)
    index = Index(
        version=VERSION,
        classes=classes,
        image_size=size,
        counts={name: len(split) for name, split in splits.items()},
        mean=mean,
        std=std,
        fingerprint=content_fingerprint(classes, splits),
        skipped=len(bad),
        skipped_first=[f"{path}: {problem}" for path, problem in bad[:10]],
        channels=first.channels,
    )
    write_synced(folder / "index.json", json.dumps(asdict(index), indent=1).encode())


def _check_something_left(name: str, source: Source, good: np.ndarray, classes: list[str]) -> None:
    """Every class needs a training picture; any other split needs a picture of some class."""
    labels = np.asarray(source.labels)
    needed = set(labels.tolist()) if name in ("train", "all") else set()
    lost = needed - set(labels[good].tolist())
    if lost or not good.any():
        what = f"class {classes[min(lost)]!r}" if lost else f"the split {name}"
        raise UserError(f"no readable picture is left in {what}: add some, or remove the folder")


def _write_header(file: io.BufferedIOBase, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )


# ---- decoded pictures at another size than their own: --image_size ------------------------------

CHUNK = 1 << 20  # bytes of resized pictures that a thread makes at once


def of_split(split: DecodedSplit) -> Source:
    channels = split.shape[2]

    def decoded(size: int, workers: int) -> Generator[tuple[np.ndarray, dict[int, str]]]:
        chunks = split.chunks(max(1, CHUNK // (channels * size * size)))
        return in_threads(lambda chunk: (resize(chunk, size), {}), chunks, workers, "resize")

    return Source("resizing", split.labels, channels, "picture {}".format, decoded)


def resized(data: ImageData, request: PictureRequest) -> ImageData:
    """The data set with pictures of `request.image_size`, memory-mapped. Its cache's key depends on
    the data set's fingerprint.

    Raises UserError if the cache cannot be written.
    """
    size = request.image_size
    what = json.dumps([VERSION, "resized", data.fingerprint, size])
    folder = request.cache_dir / hashlib.sha256(what.encode()).hexdigest()
    splits: dict[str, Any] = {"train": data.train, "val": data.val, "test": data.test}
    sources = {name: of_split(split) for name, split in splits.items() if split is not None}
    request = replace(request, on_bad="error")
    index, cached = open_cache(folder) or build_cache(folder, sources, data.classes, request, size)
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
