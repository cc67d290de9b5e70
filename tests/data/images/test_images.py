"""Shared by all data sets of pictures: statistics, fingerprints, parts of splits, settings."""

import subprocess
import sys

import numpy as np
import pytest

from utils.data.images.decoded import DecodedSplit, channel_statistics, content_fingerprint
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import IMAGE_DATASETS, load_image_data
from utils.errors import UserError


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (7, 5, 3, 3), (3000, 32, 32, 3), (40, 8, 8, 1)])
def test_channel_statistics_are_exact(shape):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    mean, std = channel_statistics(images)
    scaled = images.reshape(-1, shape[-1]).astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [0, 255])
def test_channel_statistics_of_one_colour_do_not_overflow(value):
    images = np.full((70_000, 1, 1, 3), value, np.uint8)  # more rows than a 32-bit sum can hold
    assert channel_statistics(images) == ((value / 255,) * 3, (0.0,) * 3)


def test_a_part_of_a_split_shares_its_pictures():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
    labels = rng.integers(0, 3, 9)
    whole, first, second = DecodedSplit(images, labels), np.array([7, 0, 3, 8]), np.array([3, 1])
    assert np.array_equal(np.concatenate(list(whole.chunks(2))), images)
    for part, index in (
        (whole.part(first), first),
        (whole.part(first).part(second), first[second]),  # a part of a part
        (whole.part(np.array([], np.int64)), []),
    ):
        index = np.asarray(index, np.int64)
        assert part.images is images and len(part) == len(index)
        assert part.labels.tolist() == labels[index].tolist()
        copied = DecodedSplit(images[index], labels[index])
        for size in (1, 3, 100):
            assert np.array_equal(np.concatenate([images[:0], *part.chunks(size)]), copied.images)
        if len(part):
            prints = [content_fingerprint(["a"], {"train": split}) for split in (part, copied)]
            assert prints[0] == prints[1]
            assert channel_statistics(part) == channel_statistics(copied.images)


def test_statistics_of_a_part_are_read_in_chunks():
    images = np.random.default_rng(1).integers(0, 256, (3000, 32, 32, 3), dtype=np.uint8)
    index = np.random.default_rng(2).permutation(3000)[:1500]  # two chunks
    part = DecodedSplit(images, np.zeros(3000, np.int64)).part(index)
    assert channel_statistics(part) == channel_statistics(images[index])


def test_fingerprint_changes_with_every_part_of_the_content():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    labels = np.array([0, 1, 0, 1, 0, 1])
    prints = {content_fingerprint(["a", "b"], {"train": DecodedSplit(images, labels), "val": None})}
    assert prints == {content_fingerprint(["a", "b"], {"train": DecodedSplit(images, labels)})}
    for changed in (np.flip(images, 0), images ^ (np.arange(6) == 5).reshape(6, 1, 1, 1)):
        prints.add(content_fingerprint(["a", "b"], {"train": DecodedSplit(changed, labels)}))
    prints.add(content_fingerprint(["a", "b"], {"train": DecodedSplit(images, 1 - labels)}))
    prints.add(content_fingerprint(["a", "c"], {"train": DecodedSplit(images, labels)}))
    prints.add(content_fingerprint(["a", "b"], {"test": DecodedSplit(images, labels)}))
    assert len(prints) == 6


def test_a_test_set_that_is_there_is_not_held_out(tmp_path):
    folders = {"data_dir": tmp_path, "cache_dir": tmp_path}
    for dataset in ("shapes", "cifar10"):
        with pytest.raises(UserError, match="--test_fraction has no effect"):
            load_image_data(dataset, PictureRequest(**folders, test_fraction=0.5))


def test_no_data_set_imports_torch():
    modules = {entry.split(":")[0] for entry in IMAGE_DATASETS.values()}
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
