"""Parquet files of pictures, as the Hugging Face hub has them: `--dataset parquet`.

    data_dir/data/train-00000-of-00002.parquet    and validation-..., test-..., as for shards
    data_dir/default/train-00000-of-00002.parquet likewise; in the folder of a configuration
    data_dir/default/train/0000.parquet           likewise, converted by the hub
    data_dir/default/partial-train/0000.parquet   likewise; the beginning of a large set

A row has the encoded picture, as a struct of `bytes` and `path` or as bytes, and an integer, its
label. The metadata of the hub's files tells which columns these are, and the names of the classes.

Values are compressed many at once and have no place in the file, so that a single picture costs
reading its row group. Therefore each file is unpacked once, into a tar shard in the cache, which is
read as `--dataset tar` is: as fast, with as little memory, for the disk space of the pictures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...errors import UserError, one_line
from ...files import reason
from ...machine.packages import require
from ...plural import counted
from ..cache_folder import built, require_space
from ..progress import progress_bar
from .csv_lists import LABEL_NAMES, known_columns
from .decode import in_threads
from .encoded_data import load_encoded
from .image_data import ImageData, PictureRequest
from .records import File
from .shards import divided, files_below, find_shards, listed_classes
from .split_names import first_word
from .tar import TarShard, add_sample, new_tar

VERSION = 1  # of unpacking; part of the key of the cache
ROWS_AT_ONCE = 64
HEADERS = 2048  # bytes that a tar file needs for a sample, besides the picture
# Types of columns.
PICTURE = re.compile(r"^(large_)?binary$|^struct<(.*, )?bytes: (large_)?binary[,>]")
LABEL = re.compile(r"^u?int\d+$")
# How pictures begin, and the ending of their names.
BEGINNINGS = {b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp", b"II*": "tif"}


class Columns(NamedTuple):
    image: str
    label: str
    classes: list[str] | None  # by the metadata


@dataclass(frozen=True)
class UnpackedParquet(TarShard):
    """A tar file that was unpacked from the Parquet file `source`."""

    source: str

    def sample(self, path: str, key: str) -> str:
        return f"{self.source}, row {int(key)}"


def load_parquet(name: str, request: PictureRequest) -> ImageData:
    """The files in `data_dir`, unpacked into the cache and indexed if need be. A test split without
    labels is left out.

    Raises:
        UserError: pyarrow is missing, there are several configurations, a file is damaged or has no
            such columns, the cache cannot be written, or see `load_encoded`.
    """
    root = configuration_folder(request.data_dir)
    found = find_shards(name, root, re.compile(r".*\.parquet"))
    first = next(iter(found.get("train", next(iter(found.values())))))
    columns = _columns(root / first)
    remark = f", pictures in column {columns.image}, classes in {columns.label}"
    tests = found.get("test", [])
    if tests and all(_has_no_labels(root / test, columns.label) for test in tests):
        remark += f", without the test split ({tests[0]}, ...), which has no labels"
        del found["test"]
    splits = divided(root, found, request.test_fraction)
    if partial := [file for split in splits.values() for file in split if is_partial(file)]:
        remark += f", with what the hub has converted of a larger set ({partial[0]}, ...)"
    unpacked = _unpack_all(root, splits, columns, request)
    parts: dict[str, list] = {split: [] for split in splits}
    for split, some in splits.items():
        for file in some:
            tar = File.at(root, str(unpacked[file]))
            parts[split].append(UnpackedParquet([tar], str(root / file)))
    classes = columns.classes or listed_classes(root)
    data = load_encoded(name, root, parts, request, classes)
    return replace(data, source=data.source + remark)


# ---- reading -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path):
    """A pyarrow.parquet.ParquetFile. Raises UserError, also for what is raised while it is open."""
    require("--dataset parquet", "pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(
            path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        ) as file:
            yield file
    except (ArrowException, OSError, EOFError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
        raise UserError(
            f"{path} is not a whole Parquet file ({one_line(error)}): fetch it again"
        ) from error


def _columns(path: Path) -> Columns:
    """Those of the pictures and labels. Raises UserError if the file has none."""
    from_hub: dict = {}
    with _opened(path) as file:
        schema = file.schema_arrow
        with contextlib.suppress(KeyError, TypeError, ValueError):  # not of the hub
            from_hub |= json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    types = {field.name: str(field.type) for field in schema}
    kinds = {name: one.get("_type") for name, one in from_hub.items() if isinstance(one, dict)}
    images = [name for name, kind in types.items() if PICTURE.search(kind)]
    labels = [name for name, kind in types.items() if LABEL.search(kind)]
    image = next((name for name in images if kinds.get(name) == "Image"), next(iter(images), None))
    label = next((name for name in labels if kinds.get(name) == "ClassLabel"), None)
    if label is None and (known := known_columns(labels, LABEL_NAMES)):
        label = labels[known[0]]
    if image is None or label is None:
        what = "pictures, as bytes" if image is None else "labels, as whole numbers"
        listed = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise UserError(f"{path} has no column of {what}: it has {listed[:300]}")
    named = from_hub[label].get("names") if kinds.get(label) == "ClassLabel" else None
    named = list(named.values()) if isinstance(named, dict) else named
    return Columns(image, label, [str(name) for name in named] if named else None)


def _has_no_labels(path: Path, label: str) -> bool:
    """Whether all labels are negative, by the file's statistics: the hub's way to hide them."""
    with _opened(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        chunks = [group.column(j) for group in groups for j in range(group.num_columns)]
        known = [chunk.statistics for chunk in chunks if chunk.path_in_schema == label]
        return bool(known) and all(
            one is not None and one.has_min_max and one.max < 0 for one in known
        )


def _rows(path: Path, columns: Columns) -> Iterator[tuple[bytes | None, int | None]]:
    """(picture, label) of each row. Raises UserError."""
    with _opened(path) as file:
        for name in columns[:2]:
            if name not in file.schema_arrow.names:
                raise UserError(f"{path} has no column {name!r}, which the other files have")
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(columns[:2])):
            pictures, labels = batch.column(columns.image), batch.column(columns.label)
            if (kind := pictures.type).num_fields:  # a struct
                pictures = pictures.flatten()[kind.get_field_index("bytes")]
            yield from zip(pictures.to_pylist(), labels.to_pylist(), strict=True)


# ---- unpacking -----------------------------------------------------------------------------------


def _unpack_all(
    root: Path, names: dict[str, list[str]], columns: Columns, request: PictureRequest
) -> dict[str, Path]:
    """File -> the tar file that it is unpacked into, by an earlier run or now."""
    files = [name for split in names.values() for name in split]
    what = [VERSION, columns.image, columns.label, [File.at(root, name) for name in files]]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    folder = Path(os.path.abspath(request.cache_dir)) / f"parquet-{key[:32]}"
    unpacked = {name: folder / f"{number:05}.tar" for number, name in enumerate(files)}

    def opened() -> dict[str, Path] | None:
        return unpacked if all(path.exists() for path in unpacked.values()) else None

    def fill(temporary: Path) -> None:
        todo = [(root / name, temporary / path.name) for name, path in unpacked.items()]
        needed = sum(_unpacked_size(file) for file, _ in todo)
        require_space(folder.parent, needed, f"unpacking {root}")
        _unpack(todo, columns, request)

    return opened() or built(folder, opened, fill, "unpacked pictures")


def _unpacked_size(path: Path) -> int:
    with _opened(path) as file:
        return os.stat(path).st_size + HEADERS * file.metadata.num_rows


def _unpack(todo: list[tuple[Path, Path]], columns: Columns, request: PictureRequest) -> None:
    """Unpacks each (Parquet file, tar file)."""
    total = sum(os.stat(source).st_size for source, _ in todo)
    line = f"unpacking {counted(len(todo), 'Parquet file')} ({total / 1e6:,.0f} MB), once"

    def unpack(files: tuple[Path, Path]) -> int:
        source, place = files
        state = os.stat(source)
        with new_tar(place) as archive:
            for row, (picture, label) in enumerate(_rows(source, columns)):
                add_sample(archive, row, _ending(picture or b""), picture or b"", label)
        os.utime(place, ns=(state.st_mtime_ns, state.st_mtime_ns))  # unpacked anew, it is the same
        return state.st_size

    with (
        progress_bar(
            request.progress, line, desc="unpacking", total=total, unit="B", unit_scale=True
        ) as bar,
        contextlib.closing(in_threads(unpack, todo, request.threads, "unpack")) as sizes,
    ):
        for size in sizes:
            bar.update(size)


def _ending(picture: bytes) -> str:
    """Of the picture's name in a tar file."""
    return next((end for start, end in BEGINNINGS.items() if picture.startswith(start)), "jpg")


# ---- configurations -----------------------------------------------------------------------------
# A configuration is a variant of a data set, such as a selection of its classes; the hub gives each
# a folder.


def configuration_folder(root: Path) -> Path:
    """`root`, or the folder in it that has the folders of the splits.

    Raises:
        UserError: there are several configurations.
    """
    paths = (path for path in files_below(root, 2) if path.suffix == ".parquet")
    files = [path.relative_to(root).parts for path in paths]
    if any(len(parts) == 1 or first_word(parts[0]) for parts in files):
        return root
    names = sorted({parts[0] for parts in files})
    if len(names) > 1:
        raise UserError(
            f"{root} has {len(names)} configurations of a data set: give the folder of one, as in "
            f"--data_dir {root / names[0]}"
        )
    return root / names[0] if any(len(parts) == 3 for parts in files) else root


def is_partial(name: str) -> bool:
    """Whether a file, by its path, is of a split that the hub has converted only in part."""
    return any(part.startswith("partial-") for part in Path(name).parts)
