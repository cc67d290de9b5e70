"""Packs a folder of pictures into tar shards: `python -m utils.data.images.pack FOLDER`.

Files are copied as they are, in an order that is random and always the same. The folder of shards
is whole or not there.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ...errors import UserError
from ...files import reason, write_synced
from ...place import as_called
from ...plural import counted
from ..cache_folder import built_folder
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
from .tar import PICTURES, add_sample, new_tar

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
    """Writes the shards of `folder` into the folder `output`.

    Args:
        shard_bytes: of pictures, after which a shard is full.
        on_bad: "error", or "skip" to leave out files that are not pictures.

    Returns:
        (how many shards, "file: reason" for each file left out)

    Raises:
        UserError: a file is not a picture, or `output` is not empty or cannot be written.
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
    names = "".join(f"{name}\n" for name in classes)
    total = sum(len(shard.files) for shard in shards)
    hidden = not (progress and sys.stderr.isatty())
    bar = tqdm(desc="packing", total=total, unit=" pictures", disable=hidden)
    try:
        if output.exists() and any(output.iterdir()):
            raise UserError(f"{output} is not empty: choose another --output, or remove it")
        with bar, built_folder(output, lambda: True) as temporary:
            # A folder's name need not be UTF-8. Predictions write such a class in the same way.
            write_synced(temporary / CLASSES, names.encode(errors="backslashreplace"))
            for shard in shards:
                _write(temporary / shard.name, shard, on_bad, skipped, bar)
    except OSError as error:
        raise UserError(f"cannot write {output}: {reason(error)}") from error
    return len(shards), skipped


def _write(path: Path, shard: Shard, on_bad: str, skipped: list[str], bar: tqdm) -> None:
    listing = shard.listing
    with strict_pillow(), new_tar(path) as archive:
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
        return 130
    if skipped:
        print(f"{counted(len(skipped), 'bad file')} left out, such as {skipped[0]}")
    where = f"--dataset tar --data_dir {options.output}"
    print(f"{counted(shards, 'shard')} in {options.output}: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
