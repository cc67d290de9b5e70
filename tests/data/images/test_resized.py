"""--image_size of data sets whose pictures have a size of their own."""

from dataclasses import replace

import numpy as np
import pytest
from data.images.picture_trees import load as load_tree
from PIL import Image
from small_disks import full_disk

from utils.data.images import shapes, sources
from utils.data.images.cache import resize
from utils.data.images.decoded import DecodedSplit, channel_statistics
from utils.data.images.image_data import ImageData, PictureRequest
from utils.data.images.sources import load_image_data
from utils.errors import UserError


def made_up(channels=3, side=12):
    """A small data set with pictures in memory."""
    rng = np.random.default_rng(channels)
    train, test = (
        DecodedSplit(
            rng.integers(0, 256, (n, side, side, channels), dtype=np.uint8),
            np.arange(n, dtype=np.int64) % 2,
        )
        for n in (7, 3)
    )
    mean, std = channel_statistics(train)
    return ImageData(
        "made_up", ["cat", "dog"], mean, std, train, test, f"of {channels} channels", "nowhere"
    )


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a data set that is made up, as load_image_data does."""

    def loaded(data, **settings):
        monkeypatch.setitem(sources.IMAGE_DATASETS, "made_up", "made.up:function")
        with monkeypatch.context() as patch:
            patch.setattr(sources, "resolve", lambda _: lambda name, request: data)
            request = PictureRequest(tmp_path, tmp_path / "cache", progress=False, **settings)
            return load_image_data("made_up", request)

    return loaded


def bicubic_weights(n: int, size: int) -> np.ndarray:
    """(size, n): Catmull-Rom, as wide as a pixel of the result where that is the larger one."""
    scale = n / size
    centre = (np.arange(size)[:, None] + 0.5) * scale
    x = np.abs(np.arange(n) + 0.5 - centre) / max(scale, 1)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("size", [3, 7, 31])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_resized_bicubically_and_antialiased(load, size, channels):
    data = made_up(channels)
    found = load(data, image_size=size)
    weights = bicubic_weights(12, size)
    for split in ("train", "test"):
        pictures, before = getattr(found, split).images, getattr(data, split)
        assert pictures.shape[1:] == (size, size, channels)
        assert np.array_equal(getattr(found, split).labels, before.labels)
        plain = np.einsum("xw,nhwc->nhxc", weights, before.images.astype(np.float64))
        plain = np.einsum("yh,nhxc->nyxc", weights, np.clip(plain, 0, 255))
        # Twice rounded to whole numbers.
        assert np.abs(pictures - np.clip(plain, 0, 255)).max() < 1.6
    assert (found.mean, found.std) == channel_statistics(found.train.images)
    assert (found.classes, found.synthetic) == (data.classes, data.synthetic)


@pytest.mark.parametrize("size", [5, 20])
def test_it_is_what_decoding_files_to_that_size_gives(load, tmp_path, size):
    data = made_up()
    for split in ("train", "test"):
        for name in data.classes:
            (tmp_path / "tree" / split / name).mkdir(parents=True)
        for i, picture in enumerate(getattr(data, split).images):
            path = tmp_path / "tree" / split / data.classes[i % 2] / f"{i:02}.png"
            Image.fromarray(picture).save(path)
    files, found = load_tree(tmp_path / "tree", image_size=size), load(data, image_size=size)
    order = np.argsort(data.train.labels, kind="stable")
    assert np.array_equal(files.train.images, found.train.images[order])
    assert (files.mean, files.std) == (found.mean, found.std)


def test_they_are_resized_once_for_each_size_and_data_set(load, tmp_path, monkeypatch):
    data = made_up()
    assert load(data, image_size=12) is data and load(data) is data
    assert not (tmp_path / "cache").exists()
    first, other = load(data, image_size=6), load(data, image_size=8)
    gray = load(made_up(1), image_size=6)
    changed = load(replace(data, fingerprint="another", classes=["a", "b"]), image_size=6)
    assert len(list((tmp_path / "cache").iterdir())) == 4
    assert len({one.fingerprint for one in (data, first, other, gray, changed)}) == 5
    assert "resized to 6x6" in first.source and isinstance(first.train.images, np.memmap)
    monkeypatch.setattr("utils.data.images.cache.resize", None)
    again = load(data, image_size=6)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.test.images, first.test.images)
    val = replace(data, fingerprint="with val", val=data.test)
    monkeypatch.setattr("utils.data.images.cache.resize", resize)
    assert np.array_equal(load(val, image_size=6).val.images, first.test.images)


def test_a_full_disk(load, tmp_path):
    with full_disk(300), pytest.raises(UserError, match=r"cannot write .*--cache_dir"):
        load(made_up(), image_size=16)
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(load(made_up(), image_size=16).train) == 7


def test_a_real_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "TRAIN_PER_CLASS", 3)
    monkeypatch.setattr(shapes, "TEST_PER_CLASS", 2)
    data = load_image_data("shapes", PictureRequest(tmp_path, tmp_path, image_size=8))
    assert data.train.shape == (8, 8, 3) and data.synthetic and len(data.test) == 20
