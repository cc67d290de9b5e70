"""Small imitations of the archives of CIFAR-10 and CIFAR-100, pickled like Python 2 did."""

import dataclasses
import hashlib
import io
import json
import pickle
import struct
import tarfile
import types
from typing import ClassVar

import numpy as np

from utils.data.images import cifar
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data

PER_FILE = 20


class Python2Pickler(pickle._Pickler):
    """Writes str and bytes as Python 2's 8-bit strings, the flags of a dtype as 0 and 1, and
    NumPy's old module name."""

    def save_flag(self, value):
        self.write(pickle.BININT1 + bytes([value]))

    def save_string(self, value):
        data = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    def save_global(self, obj, name=None):
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(f"c{module}\n{obj.__name__}\n".encode())

    dispatch: ClassVar = {
        **pickle._Pickler.dispatch,
        bool: save_flag,
        **dict.fromkeys((str, bytes), save_string),
        **dict.fromkeys((type, types.FunctionType), save_global),
    }


def pickled(content):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


class Imitation:
    """The files of one of the two data sets, with few pictures; `pin` replaces the published
    checksums by theirs."""

    def __init__(self, name, monkeypatch):
        self.name, self.monkeypatch = name, monkeypatch
        self.real = cifar.PUBLISHED[name]
        self.folder, self.archive = self.real.folder, self.real.archive
        self.classes = [f"class {index}" for index in range(int(name.removeprefix("cifar")))]
        rng = np.random.default_rng(0)
        self.files = {
            file: self.make_file(
                rng.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8),
                rng.integers(0, len(self.classes), PER_FILE).tolist(),
            )
            for file in (*self.real.train, *self.real.test)
        }
        self.files[self.meta_file] = pickled({self.real.class_names: self.classes})

    @property
    def train_file(self):
        """The last of the training files."""
        return list(self.real.train)[-1]

    @property
    def meta_file(self):
        return next(iter(self.real.meta))

    def make_file(self, data, labels):
        names = [f"{index}.png" for index in range(len(labels))]
        other = {"coarse_labels": [0] * len(labels)} if self.name == "cifar100" else {}
        return pickled({"data": data, self.real.labels: labels, "filenames": names, **other})

    def write_files(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in self.files.items():
            (folder / file).write_bytes(data)

    def write_archive(self, folder, *, extra=()):
        """`extra`: pairs of a TarInfo and its content."""
        members = [
            (tarfile.TarInfo(f"{self.folder}/{file}"), data) for file, data in self.files.items()
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / self.archive, "w:gz") as archive:
            for member, data in [*extra, *members]:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return folder / self.archive

    def pin(self, archive=None):
        tables = {
            table: {file: md5(self.files[file]) for file in getattr(self.real, table)}
            for table in ("train", "test", "meta")
        }
        if archive is not None:
            tables["sha256"] = hashlib.sha256(archive.read_bytes()).hexdigest()
        imitated = dataclasses.replace(self.real, **tables)
        self.monkeypatch.setitem(cifar.PUBLISHED, self.name, imitated)

    def load(self, folder):
        return load_image_data(self.name, PictureRequest(folder, folder / "cache"))


def md5(content):
    return hashlib.md5(content).hexdigest()


def fingerprint(checksums):
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()
