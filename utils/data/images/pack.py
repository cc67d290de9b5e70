"""Packs a folder of pictures into tar shards: `python -m utils.data.images.pack FOLDER`.

Files are copied as they are, in an order that is random and always the same. Every shard is whole
or not there; the same command goes on where an earlier one was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ...errors import UserError
from ...files import reason, replace_file, sync_folder, written_aside
from ...place import as_called
from ...plural import counted
from .decode import (
    measure,
    not_readable,
    raise_transient,
    strict_pillow,
    why,
)
from .file_formats import open_image
from .image_data import NoTestSet
from .imagefolder import list_tree
from .imagenet import class_names
from .listing import Listing
from .shards import CLASSES
from .split_names import is_ignored
from .tar import PICTURES, add_sample

STATE = "pack.json"  # in the folder of shards: what they are packed from
ENDINGS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "PPM": "ppm", "BMP": "bmp"}
SEED = 0  # of the order


@dataclass(frozen=True)
class Shard:
    """The files of one shard.

    Args:
        first: number of its first file in the order of the split.
        files: indices into the listing.
    """

    name: str
    listing: Listing
    first: int
    files: np.ndarray


def pack(
    folder: Path, output: Path, shard_bytes: int, on_bad: str = "error", progress: bool = True
) -> tuple[int, list[str]]:
    """Writes the shards of `folder` that `output` lacks.

    Args:
        shard_bytes: of pictures, after which a shard is full.
        on_bad: "error", or "skip" to leave out files that are not pictures.

    Returns:
        (shards in `output`, "file: reason" for each file left out of those written now)

    Raises:
        UserError: a file is not a picture, `output` holds something else, or cannot be written.
    """
    try:
        listings = list_tree(folder, None, output)
    except NoTestSet:
        listings = {"train": list_tree(folder, 0.5, output)["all"]}
    for note in (note for listing in listings.values() for note in listing.notes if progress):
        print(f"note: {note}")
    shards = [
        shard for split, listing in listings.items() for shard in _cut(split, listing, shard_bytes)
    ]
    classes = class_names(folder, next(iter(listings.values())).classes)
    skipped: list[str] = []
    with _held(output, _key(shards)):
        names = "".join(f"{name}\n" for name in classes)
        # A folder's name need not be UTF-8. Predictions write such a class in the same way.
        replace_file(output / CLASSES, names.encode(errors="backslashreplace"))
        todo = [shard for shard in shards if not (output / shard.name).exists()]
        if progress and len(todo) < len(shards):
            there = len(shards) - len(todo)
            print(f"already there: {there:,} of {counted(len(shards), 'shard')}")
        total = sum(len(shard.files) for shard in todo)
        hidden = not (progress and sys.stderr.isatty())
        with tqdm(desc="packing", total=total, unit=" pictures", disable=hidden) as bar:
            for shard in todo:
                try:
                    with written_aside(output / shard.name) as aside:
                        _write(aside, shard, on_bad, skipped, bar)
                except UserError as error:
                    raise UserError(
                        f"{error}; shards that are whole stay, and the same command goes on"
                    ) from error
    return len(shards), skipped


def _write(path: Path, shard: Shard, on_bad: str, skipped: list[str], bar: tqdm) -> None:
    listing = shard.listing
    with strict_pillow(), tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, index in enumerate(shard.files.tolist(), shard.first):
            bar.update()
            try:
                content, ending = _picture(listing.path(index))
            except Exception as error:  # a damaged file can make Pillow raise any exception
                raise_transient(listing.path(index), error)
                if on_bad == "error":
                    raise not_readable(listing.path(index), why(error), "files") from error
                skipped.append(f"{listing.path(index)}: {why(error)}")
                continue
            add_sample(archive, number, ending, content, listing.labels[index])


def _picture(path: str) -> tuple[bytes, str]:
    """(content, ending) of the picture file."""
    if not os.path.isfile(path):  # opening a pipe would block
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        content = file.read()
    source = io.BytesIO(content)
    measure(source, len(content))
    ending = Path(path).suffix[1:].lower()
    if ending not in PICTURES:
        with open_image(source) as image:
            ending = ENDINGS.get(image.format)
        if ending is None:
            raise ValueError("its format has no place in a shard; convert it to PNG")
    return content, ending


def _cut(split: str, listing: Listing, shard_bytes: int) -> list[Shard]:
    order = np.random.default_rng(SEED).permutation(len(listing.files))
    sizes = np.array([file.size for file in listing.files])[order]
    shard_of = np.cumsum(sizes) // shard_bytes
    starts = np.flatnonzero(np.diff(shard_of, prepend=-1))
    pieces = np.split(order, starts[1:])
    return [
        Shard(f"{split}-{i:05}-of-{len(pieces):05}.tar", listing, int(start), files)
        for i, (start, files) in enumerate(zip(starts, pieces, strict=True))
    ]


def _key(shards: Sequence[Shard]) -> str:
    """SHA-256 of what the shards depend on."""
    digest = hashlib.sha256()
    for shard in shards:
        for index in shard.files.tolist():
            path, *state = shard.listing.files[index]
            line = json.dumps([path, shard.listing.labels[index], state])
            digest.update(f"{shard.name} {line}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _held(output: Path, key: str) -> Iterator[None]:
    """The folder of shards, for this process alone. Raises UserError if it is not of this `key`."""
    state = json.dumps({"key": key})
    try:
        output.mkdir(parents=True, exist_ok=True)
        # A killed process may have left a hidden file.
        there = any(not is_ignored(path.name) for path in output.iterdir())
        if there and not (output / STATE).exists():
            raise UserError(f"{output} is not empty: choose another --output")
        handle = os.open(output, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write {output}: {reason(error)}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (output / STATE).exists():
            replace_file(output / STATE, state.encode())
        if (output / STATE).read_text() != state:
            raise UserError(
                f"{output} holds shards of other pictures or settings: give the settings that "
                "they were begun with, remove the folder, or choose another --output"
            )
        for left in output.glob(".writing-*"):  # of a killed process
            left.unlink()
        yield
        sync_folder(output)
    except BlockingIOError as error:
        raise UserError(f"another process is packing into {output}: wait for it") from error
    except OSError as error:
        raise UserError(f"cannot write {output}: {reason(error)}") from error
    finally:
        os.close(handle)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=as_called("python -m utils.data.images.pack"), description=__doc__, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="pictures, as --dataset imagefolder takes them")
    parser.add_argument("--output", type=Path, required=True, help="folder of the shards")
    parser.add_argument(
        "--shard_size", type=float, default=256, help="of a shard, in MB (default: 256)"
    )
    parser.add_argument(
        "--on_bad", choices=("error", "skip"), default="error",
        help="what to do with a file that is not a picture (default: error)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not options.shard_size > 0:
        parser.error("--shard_size is a number of MB above 0")
    try:
        shard_bytes = int(options.shard_size * 1e6) or 1
        shards, skipped = pack(options.folder, options.output, shard_bytes, options.on_bad)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    if skipped:
        print(f"{counted(len(skipped), 'bad file')} left out, such as {skipped[0]}")
    where = f"--dataset tar --data_dir {options.output}"
    print(f"{counted(shards, 'shard')} in {options.output}: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
