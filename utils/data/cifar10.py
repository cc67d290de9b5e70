"""CIFAR-10 from its official archive, or from the files that it holds.

The files are Python 2 pickles. Each one is read into memory, compared with its pinned checksum,
and only then unpickled, by an unpickler that knows nothing but NumPy arrays.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009).
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from utils.data.download import download
from utils.data.images import ImageData, Split, channel_statistics, refuse_folder_settings
from utils.errors import UserError

SIDE = 32
ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE_NAME = "cifar-10-python.tar.gz"
ARCHIVE_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
FOLDER = "cifar-10-batches-py"
TRAIN_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
TEST_MD5 = {"test_batch": "40351d587109b95175f43aff81a1287e"}
META_MD5 = {"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"}
MAX_FILE_BYTES = 64 << 20  # twice the largest, data_batch_1
MAX_ARCHIVE_BYTES = 512 << 20  # unpacked; the real one has 186 MB

INSTEAD = (
    "point --data_dir to a folder with a copy of it, take your own pictures with "
    "--dataset imagefolder, or the built-in ones with --dataset shapes"
)


def load_cifar10(
    *,
    data_dir: Path,
    image_size: int | None = None,
    test_fraction: float | None = None,
    **_unused,
) -> ImageData:
    """50,000 training and 10,000 test pictures, 32x32 RGB, 10 classes.

    Looks into `data_dir` for the folder or the files that torchvision unpacks, then for the
    archive, which is downloaded when it is not there.

    Raises:
        UserError: the download failed, or a file is not the one that was published.
    """
    refuse_folder_settings("cifar10", SIDE, image_size, test_fraction)
    checksums = {**TRAIN_MD5, **TEST_MD5, **META_MD5}
    archive = data_dir / ARCHIVE_NAME
    for folder in (data_dir / FOLDER, data_dir):
        if all((folder / name).is_file() for name in checksums):
            source, files = folder, {name: _read_file(folder / name) for name in checksums}
            break
    else:
        if not archive.exists():
            download(ARCHIVE_URL, archive, ARCHIVE_SHA256, hint=INSTEAD)
        source, files = archive, _read_archive(archive, set(checksums))

    contents = {}
    for name, expected in checksums.items():
        if hashlib.md5(files[name], usedforsecurity=False).hexdigest() != expected:
            raise _broken(source / name if source != archive else archive, f"{name} was changed")
        try:
            contents[name] = ArrayUnpickler(io.BytesIO(files.pop(name)), encoding="latin1").load()
        except Exception as error:  # a pickle can fail in any way
            raise _broken(source, f"{name}: {error}") from error
    try:
        train = _to_split([contents[name] for name in TRAIN_MD5])
        test = _to_split([contents[name] for name in TEST_MD5])
        classes = [str(name) for name in contents["batches.meta"]["label_names"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(source, f"not what CIFAR-10 holds: {error}") from error
    mean, std = channel_statistics(train.images)
    return ImageData(
        name="cifar10",
        classes=classes,
        mean=mean,
        std=std,
        train=train,
        test=test,
        fingerprint=hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest(),
        source=str(source),
    )


def _read_file(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {INSTEAD}") from error


def _read_archive(path: Path, names: set[str]) -> dict[str, bytes]:
    """The members FOLDER/name of a verified archive, by name. Nothing is written to disk."""
    found: dict[str, bytes] = {}
    try:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != ARCHIVE_SHA256:
                raise _broken(path, "its SHA-256 is not that of the published archive")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                unpacked = 0
                for member in archive:
                    unpacked += member.size
                    if member.size > MAX_FILE_BYTES or unpacked > MAX_ARCHIVE_BYTES:
                        raise _broken(path, f"{member.name!r} is too large")
                    folder, _, name = member.name.partition("/")
                    if folder != FOLDER or name not in names:
                        continue
                    if not member.isreg() or name in found:
                        raise _broken(path, f"{member.name!r} is no regular file, or there twice")
                    found[name] = archive.extractfile(member).read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise _broken(path, str(error)) from error
    if names - found.keys():
        raise _broken(path, f"{min(names - found.keys())} is missing")
    return found


def _make_dtype(spec: str, align: int, copy: int) -> np.dtype:
    """The published files have 0 and 1 for the flags, where some NumPy releases want a bool."""
    return np.dtype(spec, bool(align), bool(copy))


class ArrayUnpickler(pickle.Unpickler):
    """Admits the three names by which a NumPy array is pickled, and refuses every other one."""

    # `numpy.core` is what the published files say; NumPy 2 has moved it to `numpy._core`.
    _ADMITTED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): _make_dtype,
    }

    def find_class(self, module: str, name: str) -> object:
        try:
            return self._ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}") from None


def _to_split(batches: list[dict]) -> Split:
    """Batches of `data`, (samples, 3072) uint8 in planes of R, G, B, and `labels`, a list."""
    images, labels = [], []
    for batch in batches:
        data, label = batch["data"], np.asarray(batch["labels"], np.int64)
        if data.dtype != np.uint8 or data.shape != (len(label), 3 * SIDE * SIDE):
            raise ValueError(f"an array {data.dtype} {data.shape} for {len(label)} labels")
        planes = data.reshape(-1, 3, SIDE, SIDE)
        images.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
        labels.append(label)
    return Split(np.concatenate(images), np.concatenate(labels))


def _broken(path: Path, reason: str) -> UserError:
    reason = " ".join(reason.split())
    return UserError(f"{path} is broken ({reason}): delete it to download it again, or {INSTEAD}")
