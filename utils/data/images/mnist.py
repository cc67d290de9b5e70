"""MNIST and Fashion-MNIST from the four gzip-compressed IDX files in which both are published.

Each file is read into memory and compared with its pinned checksum before it is unpacked. The
format: two zero bytes, a type (8: unsigned bytes), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values, row by row (https://yann.lecun.com/exdb/mnist/).

LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition (1998).
Xiao, Rasul and Vollgraf, Fashion-MNIST (2017), https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import gzip
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..download import download, refuse_strange_folder
from .decoded import DecodedSplit
from .image_data import ImageData, PictureRequest
from .published import Contents, Published, md5

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


@dataclass(frozen=True, kw_only=True)
class IdxFiles(Published):
    """Four packed files; `url` is that of their folder, `folder` torchvision's name for the folder
    below --data_dir."""

    INSTEAD = (
        "point --data_dir to a folder with the four .gz files (not unpacked: checksums are "
        "published only for the .gz files), use your own pictures with --dataset imagefolder, or "
        "the built-in ones with --dataset shapes"
    )

    md5: dict[str, str]  # of the packed files, hexadecimal
    classes: list[str]

    @property
    def checksums(self) -> dict[str, str]:
        return self.md5

    def contents(self, data_dir: Path) -> Contents:
        """Looks for each packed file where torchvision puts it, MNIST/raw or FashionMNIST/raw below
        `data_dir`, then in `data_dir` itself; if it is in neither, it is downloaded to the former.
        """
        paths = {file: self._find(data_dir, file) for file in self.md5}
        train = self._read_split(paths[TRAIN_IMAGES], paths[TRAIN_LABELS])
        test = self._read_split(paths[TEST_IMAGES], paths[TEST_LABELS])
        return Contents(list(self.classes), train, test, paths[TRAIN_IMAGES].parent)

    def _find(self, data_dir: Path, name: str) -> Path:
        """The path of a file, which is downloaded if it is absent."""
        home = data_dir / self.folder / name
        if os.path.exists(home):
            return home
        beside = data_dir / name
        # The files of both data sets have the same names: skip a file of the other one.
        if os.path.isfile(beside):
            others = (other for other in PUBLISHED.values() if other is not self)
            found = md5(self.read_file(beside))
            if not any(found in other.md5.values() for other in others):
                return beside
        refuse_strange_folder(data_dir, self.name)
        download(self.url + name, home, self.md5[name], hint=self.INSTEAD)
        return home

    def _read_split(self, images_file: Path, labels_file: Path) -> DecodedSplit:
        images, labels = self._read_idx(images_file), self._read_idx(labels_file)
        return DecodedSplit(images[..., np.newaxis], labels.astype(np.int64))

    def _read_idx(self, path: Path) -> np.ndarray:
        """The values of a packed IDX file, an array of uint8 with the dimensions in its header."""
        packed = self.read_file(path)
        if md5(packed) != self.md5[path.name]:
            raise self.broken(path, "its MD5 is not that of the published file")
        content = gzip.decompress(packed)
        shape = struct.unpack_from(f">{content[3]}I", content, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


# The MD5 sums and MNIST's address are those of torchvision (datasets/mnist.py). Fashion-MNIST's
# address is its authors' repository, since torchvision's is plain HTTP.
PUBLISHED = {
    "mnist": IdxFiles(
        name="mnist",
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        folder="MNIST/raw",
        md5={
            TRAIN_IMAGES: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            TRAIN_LABELS: "d53e105ee54ea40749a09fcbcd1e9432",
            TEST_IMAGES: "9fb629c4189551a2d022fa330f9573f3",
            TEST_LABELS: "ec29112dd5afa0611ce80d1b7f02629c",
        },
        classes=[str(digit) for digit in range(10)],
    ),
    "fashion_mnist": IdxFiles(
        name="fashion_mnist",
        url="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        folder="FashionMNIST/raw",
        md5={
            TRAIN_IMAGES: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            TRAIN_LABELS: "25c81989df183df01b3e8a0aad5dffbe",
            TEST_IMAGES: "bef4ecab320f06d8554ea6380940ec79",
            TEST_LABELS: "bb300cfdad3c16e7a12a480ee83cd310",
        },
        classes=[
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ],
    ),
}


def load_mnist(name: str, request: PictureRequest) -> ImageData:
    """60,000 training and 10,000 test pictures of digits or of clothes, 28x28 gray, 10 classes."""
    return PUBLISHED[name].load(request)
