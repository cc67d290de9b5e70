"""Parquet files of pictures, as the Hugging Face hub has them: `--dataset parquet`.

    data_dir/data/train-00000-of-00002.parquet    and validation-..., test-..., as for shards
    data_dir/default/train/0000.parquet           in the folder of a configuration, see hub.py

A row has the encoded picture, as a struct of `bytes` and `path` or as bytes, and an integer, its
label. The metadata of the hub's files tells which columns these are, and the names of the classes.

Values are compressed many at once and have no place in the file, so that a single picture costs
reading its row group. Therefore each file is unpacked once, into a tar shard in the cache, which is
read as `--dataset tar` is: as fast, with as little memory, for the disk space of the pictures.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from utils.data.images.csv_lists import LABEL_NAMES
from utils.data.images.encoded_data import load_encoded
from utils.data.images.form import USUAL, Form
from utils.data.images.hub import configuration_folder, is_partial
from utils.data.images.record_index import Indexing
from utils.data.images.records import FileState
from utils.data.images.scanning import SplitFiles
from utils.data.images.shards import divided, find_shards, listed_classes, with_names_apart
from utils.data.images.sources import ImageData
from utils.data.images.tar import TarShard, add_sample
from utils.errors import UserError, one_line
from utils.files import reason, sync_folder, written_aside
from utils.plural import counted

VERSION = 1  # of unpacking; part of the names of unpacked files
ROWS_AT_ONCE = 64
HEADERS = 2048  # bytes that a tar file needs for a sample, besides the picture
LOCK = ".lock"  # held by a process that unpacks
IN_USE = ".in-use"  # locked by all processes that read unpacked files
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


def load_parquet(
    *,
    data_dir: Path,
    cache_dir: Path,
    image_size: int | None = None,
    on_bad: str = "error",
    test_fraction: float | None = None,
    form: Form = USUAL,
    workers: int = 1,
    progress: bool = True,
    **_unused,
) -> ImageData:
    """The files in `data_dir`, unpacked into `cache_dir` and indexed if need be.

    val is the validation split if there is a test split with labels, else the test set.

    Raises:
        UserError: pyarrow is missing, there are several configurations, a file is damaged or has no
            such columns, the cache cannot be written, or see `load_encoded`.
    """
    data_dir = configuration_folder(data_dir)
    found = find_shards("parquet", data_dir, re.compile(r".*\.parquet"))
    first = next(iter(found.get("train", next(iter(found.values())))))
    columns = _columns(data_dir / first)
    remark = f", pictures in column {columns.image}, classes in {columns.label}"
    tests = found.get("test", [])
    if tests and all(_has_no_labels(data_dir / name, columns.label) for name in tests):
        remark += f", without the test split ({tests[0]}, ...), which has no labels"
        del found["test"]
    names = divided(data_dir, found, test_fraction)
    if partial := [name for split in names.values() for name in split if is_partial(name)]:
        remark += f", with what the hub has converted of a larger set ({partial[0]}, ...)"
    unpacked = _unpack_all(data_dir, names, columns, cache_dir, workers, progress)
    data = load_encoded(
        "parquet",
        data_dir,
        {split: _split_files(data_dir, names[split], unpacked) for split in names},
        Indexing(cache_dir, on_bad, workers, progress),
        classes=columns.classes or listed_classes(data_dir),
        image_size=image_size,
        form=form,
        test_fraction=test_fraction,
    )
    return replace(with_names_apart(data), source=data.source + remark)


def _split_files(root: Path, names: list[str], unpacked: dict[str, Path]) -> SplitFiles:
    paths = [unpacked[name] for name in names]
    states = [os.stat(path) for path in paths]
    return SplitFiles(
        [
            UnpackedParquet([str(path)], str(root / name))  # type: ignore[misc]  # it is frozen
            for name, path in zip(names, paths, strict=True)
        ],
        [FileState(state.st_size, state.st_mtime_ns) for state in states],
    )


# ---- reading -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path):
    """A pyarrow.parquet.ParquetFile. Raises UserError, also for what is raised while it is open."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError("--dataset parquet needs one more package: pip install pyarrow") from error
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
    from_hub = {}
    with _opened(path) as file:
        schema = file.schema_arrow
        with contextlib.suppress(KeyError, TypeError, ValueError):  # not of the hub
            from_hub = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    types = {field.name: str(field.type) for field in schema}
    kinds = {name: from_hub[name].get("_type") for name in types if _is_feature(from_hub, name)}

    def plain(name: str) -> str:
        return name.lower().replace("_", " ")

    images = [name for name, kind in types.items() if PICTURE.search(kind)]
    labels = [name for name, kind in types.items() if LABEL.search(kind)]
    image = next((name for name in images if kinds.get(name) == "Image"), next(iter(images), None))
    label = next((name for name in labels if kinds.get(name) == "ClassLabel"), None)
    if label is None:
        label = next((name for want in LABEL_NAMES for name in labels if plain(name) == want), None)
    if image is None or label is None:
        what = "pictures, as bytes" if image is None else "labels, as whole numbers"
        listed = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise UserError(f"{path} has no column of {what}: it has {listed[:300]}")
    named = from_hub[label].get("names") if kinds.get(label) == "ClassLabel" else None
    named = list(named.values()) if isinstance(named, dict) else named
    return Columns(image, label, [str(name) for name in named] if named else None)


def _is_feature(features: object, name: str) -> bool:
    return isinstance(features, dict) and isinstance(features.get(name), dict)


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
    root: Path, names: dict[str, list[str]], columns: Columns, cache_dir: Path, workers: int,
    progress: bool,
) -> dict[str, Path]:  # fmt: skip
    """File -> the tar file that it is unpacked into, by an earlier run or now."""
    place = hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:16]
    folder = Path(os.path.abspath(cache_dir)) / f"parquet-{place}"
    files = [name for split in names.values() for name in split]
    unpacked = {name: folder / _unpacked_name(root, name, columns) for name in files}
    use = _use(folder)
    if all(path.exists() for path in unpacked.values()):
        return unpacked
    with _held(folder):
        wanted = {LOCK, IN_USE, *(path.name for path in unpacked.values())}
        alone = _is_only_user(use)
        for path in folder.iterdir():  # of files that have changed, or of a killed process
            if path.name not in wanted and (alone or path.name.startswith(".writing-")):
                path.unlink()
        todo = [name for name in files if not unpacked[name].exists()]
        _check_space(folder, root, todo)
        _unpack(root, {name: unpacked[name] for name in todo}, columns, workers, progress)
        sync_folder(folder)
    return unpacked


def _unpacked_name(root: Path, name: str, columns: Columns) -> str:
    state = os.stat(root / name)
    what = [VERSION, name, state.st_size, state.st_mtime_ns, columns.image, columns.label]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    return f"{Path(name).stem}-{key[:16]}.tar"


@functools.cache
def _use(folder: Path) -> int | None:
    """Locks the folder until this process ends, so that no other one deletes the unpacked files
    that this one reads, such as a process on another machine with other files in the same place.
    Returns the descriptor of the lock; None: the folder has none."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        use = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(use, fcntl.LOCK_SH)
        return use
    return None


def _is_only_user(use: int | None) -> bool:
    """Whether no other process uses the folder."""
    if use is None:
        return False
    try:
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        fcntl.flock(use, fcntl.LOCK_SH)
    return True


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder of unpacked files; another process that unpacks into it is waited for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise UserError(
            f"cannot unpack pictures into {folder}: {reason(error)}; choose another folder with "
            "--cache_dir"
        ) from error


def _check_space(folder: Path, root: Path, todo: list[str]) -> None:
    needed = 0
    for name in todo:
        with _opened(root / name) as file:
            needed += os.stat(root / name).st_size + HEADERS * file.metadata.num_rows
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the pictures in {root} need {needed / 1e6:,.0f} MB unpacked, and {folder} has "
            f"{free / 1e6:,.0f} MB free: free some space, or choose another folder with --cache_dir"
        )


def _unpack(
    root: Path, todo: dict[str, Path], columns: Columns, workers: int, progress: bool
) -> None:
    sizes = {name: os.stat(root / name).st_size for name in todo}
    terminal = sys.stderr.isatty()
    if progress and not terminal:
        size = sum(sizes.values()) / 1e6
        what = counted(len(todo), "Parquet file")
        print(f"unpacking {what} ({size:,.0f} MB), once", file=sys.stderr)
    stopped = threading.Event()

    def unpack(name: str) -> None:
        with (
            written_aside(todo[name]) as aside,
            tarfile.open(aside, "w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for row, (picture, label) in enumerate(_rows(root / name, columns)):
                if stopped.is_set():
                    raise UserError("another file could not be unpacked")
                add_sample(archive, row, _ending(picture or b""), picture or b"", label)
        bar.update(sizes[name])

    pool = ThreadPoolExecutor(workers, thread_name_prefix="unpack")
    with tqdm(
        desc="unpacking", total=sum(sizes.values()), unit="B", unit_scale=True,
        disable=not (progress and terminal),
    ) as bar:  # fmt: skip
        try:
            for future in [pool.submit(unpack, name) for name in todo]:
                future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _ending(picture: bytes) -> str:
    """Of the picture's name in a tar file."""
    return next((end for start, end in BEGINNINGS.items() if picture.startswith(start)), "jpg")
