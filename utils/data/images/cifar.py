"""CIFAR-10 and CIFAR-100 from their official archives, or from the files in those.

The files are Python 2 pickles. Each is read into memory and compared with its pinned checksum
before it is unpickled, by an unpickler that admits only NumPy arrays.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009);
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..download import download, refuse_strange_folder
from .decoded import DecodedSplit
from .image_data import ImageData, PictureRequest
from .published import Contents, Published, md5

SIDE = 32  # of all pictures, in pixels


@dataclass(frozen=True, kw_only=True)
class Archive(Published):
    """A tar archive. `train`, `test` and `meta` map file names to MD5 sums (hexadecimal)."""

    INSTEAD = (
        "point --data_dir to a folder with a copy of it, use your own pictures with "
        "--dataset imagefolder, or the built-in ones with --dataset shapes"
    )

    sha256: str
    train: dict[str, str]
    test: dict[str, str]
    meta: dict[str, str]
    labels: str  # key of the labels in a file of pictures
    class_names: str  # key of the names in the meta file

    @property
    def archive(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def checksums(self) -> dict[str, str]:
        return {**self.train, **self.test, **self.meta}

    def contents(self, data_dir: Path) -> Contents:
        """Looks in `data_dir` for the folder that torchvision unpacks, for its files, and for the
        archive, in this order; without any of them the archive is downloaded."""
        source, files = self._published_files(data_dir)
        batches = {}
        for file in self.checksums:  # as published, so that their contents need no checks
            content = io.BytesIO(files.pop(file))
            batches[file] = ArrayUnpickler(content, encoding="latin1").load()
        train = self._to_split([batches[file] for file in self.train])
        test = self._to_split([batches[file] for file in self.test])
        (meta,) = self.meta
        classes = [str(label) for label in batches[meta][self.class_names]]
        return Contents(classes, train, test, source)

    def _published_files(self, data_dir: Path) -> tuple[Path, dict[str, bytes]]:
        """Where the files were found, and their verified contents by name."""
        for folder in (data_dir / self.folder, data_dir):
            if not all(os.path.isfile(folder / file) for file in self.checksums):
                continue
            files = {}
            for file, expected in self.checksums.items():
                files[file] = self.read_file(folder / file)
                if md5(files[file]) != expected:
                    raise self.broken(folder / file, f"{file} was changed")
            return folder, files
        archive = data_dir / self.archive
        if not os.path.exists(archive):
            refuse_strange_folder(data_dir, self.name)
            download(self.url, archive, self.sha256, hint=self.INSTEAD)
        return archive, self._read_archive(archive)

    def _read_archive(self, path: Path) -> dict[str, bytes]:
        """Verifies the archive; returns its files by name. Nothing is written to disk."""
        names = {f"{self.folder}/{file}": file for file in self.checksums}
        try:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    raise self.broken(path, "its SHA-256 is not that of the published archive")
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:gz") as archive:
                    found = (member for member in archive if member.name in names)
                    return {names[one.name]: archive.extractfile(one).read() for one in found}
        except OSError as error:
            raise self.broken(path, str(error)) from error

    def _to_split(self, batches: list[dict]) -> DecodedSplit:
        """One split from the unpickled files.

        Args:
            batches: each has `data`, (samples, 3072) uint8: a plane of red, one of green and one
                of blue; and under the key `self.labels` a list of labels.
        """
        labels = np.concatenate([np.asarray(batch[self.labels], np.int64) for batch in batches])
        planes = [batch["data"].reshape(-1, 3, SIDE, SIDE) for batch in batches]
        images = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
        np.concatenate([each.transpose(0, 2, 3, 1) for each in planes], out=images)
        return DecodedSplit(images, labels)


# The MD5 sums are those of torchvision (datasets/cifar.py), the SHA-256 sums those of Keras
# (keras/src/datasets/cifar10.py and cifar100.py).
PUBLISHED = {
    "cifar10": Archive(
        name="cifar10",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        meta={"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
        labels="labels",
        class_names="label_names",
    ),
    "cifar100": Archive(
        name="cifar100",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta={"meta": "7973b15100ade9c7d40fb424638fde48"},
        labels="fine_labels",
        class_names="fine_label_names",
    ),
}


def load_cifar(name: str, request: PictureRequest) -> ImageData:
    """50,000 training and 10,000 test pictures, 32x32 RGB, of 10 classes, or of the 100 classes of
    CIFAR-100's "fine" labels."""
    return PUBLISHED[name].load(request)


def _make_dtype(spec: str, align: int, copy: int) -> np.dtype:
    """The published files hold 0 and 1 as flags, for which some NumPy releases need a bool."""
    return np.dtype(spec, bool(align), bool(copy))


class ArrayUnpickler(pickle.Unpickler):
    """Admits the three names by which NumPy arrays are pickled, and no other."""

    # The published files have `numpy.core`, which NumPy 2 has renamed to `numpy._core`.
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
