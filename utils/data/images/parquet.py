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
import fcntl
import hashlib
import json
import os
import re
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...errors import UserError, one_line
from ...files import reason, sync_folder
from ...machine.packages import require
from ...plural import counted
from ..cache_folder import LOCK, remove_abandoned, require_space, temporary_folder
from ..progress import progress_bar
from .csv_lists import LABEL_NAMES, known_columns
from .encoded_data import load_encoded
from .image_data import ImageData, PictureRequest
from .records import File
from .shards import divided, files_below, find_shards, listed_classes
from .split_names import first_word
from .tar import TarShard, add_sample

VERSION = 1  # of unpacking; part of the names of unpacked files
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
    place = hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:16]
    folder = Path(os.path.abspath(request.cache_dir)) / f"parquet-{place}"
    files = [name for split in names.values() for name in split]
    unpacked = {name: folder / _unpacked_name(root, name, columns) for name in files}
    if not all(path.exists() for path in unpacked.values()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / LOCK, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                remove_abandoned(folder)
                todo = {root / name: path for name, path in unpacked.items() if not path.exists()}
                require_space(folder, sum(map(_unpacked_size, todo)), f"unpacking {root}")
                if todo:  # else another process has unpacked them meanwhile
                    _unpack(todo, columns, request)
                    sync_folder(folder)
        except OSError as error:
            raise UserError(
                f"cannot unpack pictures into {folder}: {reason(error)}; choose another folder "
                "with --cache_dir"
            ) from error
    return unpacked


def _unpacked_name(root: Path, name: str, columns: Columns) -> str:
    what = [VERSION, *File.at(root, name), columns.image, columns.label]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    return f"{Path(name).stem}-{key[:16]}.tar"


def _unpacked_size(path: Path) -> int:
    with _opened(path) as file:
        return os.stat(path).st_size + HEADERS * file.metadata.num_rows


def _unpack(todo: dict[Path, Path], columns: Columns, request: PictureRequest) -> None:
    size = sum(os.stat(path).st_size for path in todo)
    line = f"unpacking {counted(len(todo), 'Parquet file')} ({size / 1e6:,.0f} MB), once"
    stopped = threading.Event()

    def unpack(path: Path) -> None:
        state, place = os.stat(path), todo[path]
        with temporary_folder(place.parent) as temporary:
            with open(temporary / place.name, "wb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                    for row, (picture, label) in enumerate(_rows(path, columns)):
                        if stopped.is_set():
                            raise UserError("another file could not be unpacked")
                        add_sample(archive, row, _ending(picture or b""), picture or b"", label)
                file.flush()
                os.fsync(file.fileno())
            # Another process may unpack the same: it makes no difference whose file stays.
            os.utime(temporary / place.name, ns=(state.st_mtime_ns, state.st_mtime_ns))
            os.replace(temporary / place.name, place)
        bar.update(state.st_size)

    pool = ThreadPoolExecutor(request.threads, thread_name_prefix="unpack")
    with progress_bar(
        request.progress, line, desc="unpacking", total=size, unit="B", unit_scale=True
    ) as bar:
        try:
            for future in [pool.submit(unpack, path) for path in todo]:
                future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


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
