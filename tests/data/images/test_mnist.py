"""MNIST and Fashion-MNIST from small imitations of their files, and batches of gray pictures."""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from utils.augment.crop_flip import CropFlip
from utils.data.images import mnist
from utils.data.images.image_data import PictureRequest
from utils.data.images.loader import ImageLoader
from utils.data.images.mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from utils.data.images.sources import load_image_data
from utils.errors import UserError

TRAIN, TEST = 30, 20


def idx(array):
    """The IDX format: zero, zero, type, number of dimensions, the dimensions, the values."""
    shape = array.shape
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + array.tobytes()


class Imitation:
    """The files of one of the two data sets, with few pictures; `pin` replaces the published
    checksums by theirs."""

    def __init__(self, name, monkeypatch):
        self.name, self.monkeypatch = name, monkeypatch
        self.real = mnist.PUBLISHED[name]
        rng = np.random.default_rng(len(name))
        self.arrays = {
            TRAIN_IMAGES: rng.integers(0, 256, (TRAIN, 28, 28), dtype=np.uint8),
            TRAIN_LABELS: rng.integers(0, 10, TRAIN, dtype=np.uint8),
            TEST_IMAGES: rng.integers(0, 256, (TEST, 28, 28), dtype=np.uint8),
            TEST_LABELS: rng.integers(0, 10, TEST, dtype=np.uint8),
        }
        self.files = {name: gzip.compress(idx(array)) for name, array in self.arrays.items()}
        self.pin()

    def pin(self):
        imitated = dataclasses.replace(
            self.real,
            md5={name: hashlib.md5(data).hexdigest() for name, data in self.files.items()},
        )
        self.monkeypatch.setitem(mnist.PUBLISHED, self.name, imitated)

    def write(self, folder, names=None):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or self.files:
            (folder / name).write_bytes(self.files[name])

    def load(self, folder):
        return load_image_data(self.name, PictureRequest(folder, folder / "cache"))


@pytest.fixture(params=["mnist", "fashion_mnist"])
def imitation(request, monkeypatch):
    return Imitation(request.param, monkeypatch)


def assert_names_the_ways_out(message):
    assert "\n" not in message
    for way in ("--data_dir", ".gz", "not unpacked", "--dataset imagefolder", "--dataset shapes"):
        assert way in message


def test_as_torchvision_puts_it_and_flat(imitation, tmp_path, no_network):
    torchvision_folder = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}
    home = tmp_path / "a" / torchvision_folder[imitation.name]
    imitation.write(home)
    imitation.write(tmp_path / "b")
    sums = mnist.PUBLISHED[imitation.name].md5
    fingerprint = hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()
    for folder, source in ((tmp_path / "a", home), (tmp_path / "b", tmp_path / "b")):
        data = imitation.load(folder)
        assert data.name == imitation.name and data.source == str(source)
        assert len(data.classes) == 10 and not data.synthetic and data.val is None
        assert data.fingerprint == fingerprint
        for split, images, labels in (
            (data.train, TRAIN_IMAGES, TRAIN_LABELS),
            (data.test, TEST_IMAGES, TEST_LABELS),
        ):
            assert np.array_equal(split.images, imitation.arrays[images][..., None])
            assert np.array_equal(split.labels, imitation.arrays[labels])
        scaled = imitation.arrays[TRAIN_IMAGES] / 255
        assert data.mean == pytest.approx((scaled.mean(),))
        assert data.std == pytest.approx((scaled.std(),))
    assert sorted(os.listdir(home)) == sorted(
        imitation.files
    )  # nothing was unpacked or left behind


def test_absent_files_are_downloaded_to_where_torchvision_looks(imitation, tmp_path, monkeypatch):
    home = tmp_path / imitation.real.folder
    imitation.write(home, [TRAIN_LABELS])
    imitation.write(tmp_path, [TEST_IMAGES])
    calls = []

    def fetch(url, path, checksum, *, hint):
        assert checksum == mnist.PUBLISHED[imitation.name].md5[path.name]
        assert_names_the_ways_out(hint)
        calls.append((url, path))
        path.write_bytes(imitation.files[path.name])

    monkeypatch.setattr(mnist, "download", fetch)
    for _ in range(2):
        assert len(imitation.load(tmp_path).train) == TRAIN
    absent = (TRAIN_IMAGES, TEST_LABELS)
    assert calls == [(imitation.real.url + name, home / name) for name in absent]
    assert imitation.real.url.startswith("https://") and imitation.real.url.endswith("/")


def test_files_of_the_other_data_set_under_the_same_names_are_left_alone(
    tmp_path, monkeypatch, no_network
):
    digits, clothes = (Imitation(name, monkeypatch) for name in ("mnist", "fashion_mnist"))
    digits.write(tmp_path)
    clothes.write(tmp_path / clothes.real.folder)
    assert np.array_equal(clothes.load(tmp_path).test.labels, clothes.arrays[TEST_LABELS])
    assert np.array_equal(digits.load(tmp_path).test.labels, digits.arrays[TEST_LABELS])
    (tmp_path / clothes.real.folder / TEST_LABELS).unlink()
    with pytest.raises(UserError, match="cannot download"):
        clothes.load(tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_published_sums(name):
    published = mnist.PUBLISHED[name]
    assert len(published.md5) == 4 and len(published.classes) == 10
    spec = importlib.util.find_spec("torchvision")  # importing it would take seconds
    if spec is None:
        pytest.skip("needs torchvision to compare the sums with")
    source = Path(spec.origin).parent.joinpath("datasets", "mnist.py").read_text(encoding="utf-8")
    for file, value in published.md5.items():
        assert f'("{file}", "{value}")' in source
    if name == "mnist":
        assert f'"{published.url}"' in source
    else:
        assert json.dumps(published.classes) in source


def test_without_network_the_ways_out_are_named(imitation, tmp_path, no_network):
    home = tmp_path / imitation.real.folder
    home.mkdir(parents=True)
    (home / TRAIN_IMAGES.removesuffix(".gz")).write_bytes(b"unpacked, whose sum nobody knows")
    with pytest.raises(UserError) as error:
        imitation.load(tmp_path)
    assert_names_the_ways_out(str(error.value))


def test_a_changed_file_and_one_that_cannot_be_read(imitation, tmp_path, no_network):
    imitation.write(tmp_path)
    path = tmp_path / TEST_IMAGES
    path.write_bytes(imitation.files[TEST_IMAGES][:-1] + b"!")
    with pytest.raises(UserError, match="its MD5 is not that of the published file") as error:
        imitation.load(tmp_path)
    assert str(path) in str(error.value) and "delete it to download it again" in str(error.value)
    assert_names_the_ways_out(str(error.value))
    (tmp_path / imitation.real.folder / TEST_IMAGES).mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot read .*Is a directory") as error:
        imitation.load(tmp_path)
    assert_names_the_ways_out(str(error.value))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_a_test_fraction_is_refused(name, tmp_path):
    folders = {"data_dir": tmp_path, "cache_dir": tmp_path}
    with pytest.raises(UserError, match=f"--test_fraction has no effect on --dataset {name}"):
        load_image_data(name, PictureRequest(**folders, test_fraction=0.5))


@pytest.mark.parametrize("channels_last", [False, True])
def test_gray_batches_are_the_pictures_normalised(tmp_path, monkeypatch, channels_last, no_network):
    imitation = Imitation("mnist", monkeypatch)
    imitation.write(tmp_path)
    data = imitation.load(tmp_path)
    nothing = CropFlip(28, 28, padding=0, flip=0.0)  # the code path of augmentation
    for augment in (None, nothing):
        loader = ImageLoader(
            data.train.images,
            data.train.labels,
            mean=data.mean,
            std=data.std,
            batch_size=16,
            device=torch.device("cpu"),
            augment=augment,
            channels_last=channels_last,
        )
        batches = list(loader.epoch())
        inputs = torch.cat([batch.inputs for batch in batches])
        assert inputs.shape == (TRAIN, 1, 28, 28)
        expected = (imitation.arrays[TRAIN_IMAGES][:, None] / 255 - data.mean[0]) / data.std[0]
        np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)
        targets = torch.cat([batch.targets for batch in batches])
        assert torch.equal(targets, torch.from_numpy(data.train.labels))


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_gray_pictures_are_augmented_as_those_of_three_channels(mode):
    """One channel gives the same as the first of three equal channels."""
    rng = np.random.default_rng(0)
    gray = torch.from_numpy(rng.integers(1, 256, (12, 28, 28, 1), dtype=np.uint8))
    augment = CropFlip(28, 28, padding=4, mode=mode, flip=0.5, cutout=8)
    plan = augment.draw(12, rng)
    index = rng.permutation(12)
    augmented = augment.apply(gray, plan, index)
    assert augmented.shape == gray.shape
    packed = torch.from_numpy(augment.pack(plan, index))
    assert torch.equal(augmented, augment.apply_packed(gray, packed))
    colour = CropFlip(28, 28, padding=4, mode=mode, flip=0.5, cutout=8)
    thrice = colour.apply(gray.expand(-1, -1, -1, 3).contiguous(), plan, index)
    assert torch.equal(augmented, thrice[..., :1])
    assert not torch.equal(augmented, gray[index])
