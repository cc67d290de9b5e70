"""The built-in pictures: the same on every machine, and not learnt by a linear classifier."""

import hashlib

import numpy as np
import pytest

from utils.data.images.image_data import PictureRequest
from utils.data.images.shapes import SHAPES, draw
from utils.data.images.sources import load_image_data


@pytest.fixture(scope="module")
def shapes():
    return load_image_data("shapes", PictureRequest("nowhere", "nowhere"))


def test_form(shapes):
    assert shapes.synthetic and shapes.val is None and shapes.skipped == 0
    assert shapes.classes == sorted(shapes.classes) and len(shapes.classes) == 10
    assert shapes.train.images.shape == (5000, 32, 32, 3)
    assert shapes.test.images.shape == (1000, 32, 32, 3)
    assert np.bincount(shapes.train.labels).tolist() == [500] * 10
    assert np.bincount(shapes.test.labels).tolist() == [100] * 10


def test_the_same_bytes_on_every_machine(shapes):
    """A change of the pictures would change the data of resumed runs."""
    assert (
        hashlib.sha256(shapes.test.images).hexdigest()
        == "b438d0ad2bc2d04260186d9268362998e96cd8cf994562619d7e6d296718d67a"
    )
    assert shapes.fingerprint == "06ff2718cef95c7ee4a23c840e8e5086e7cc78326c6ff5da9e0c0200b078d154"


def test_no_picture_is_in_both_splits(shapes):
    train = {picture.tobytes() for picture in shapes.train.images}
    assert len(train) == 5000
    assert not train & {picture.tobytes() for picture in shapes.test.images}


@pytest.mark.parametrize("name", SHAPES)
def test_a_flip_or_a_shift_keeps_the_class(name):
    """The shape is symmetric, and its corners are not far outside of its radius."""
    distance, _ = SHAPES[name]
    grid = np.linspace(-3, 3, 241, dtype=np.float32)
    u, v = np.meshgrid(grid, grid)
    inside = distance(u, v) < 0
    assert np.hypot(u, v)[inside].max() < 1.36  # the corners of bars
    assert np.array_equal(inside, inside[:, ::-1])
    assert 0.05 < inside.mean() * 36 / np.pi < 1.1  # the area, in circles of radius 1


def test_a_linear_classifier_fails(shapes):
    def features(split):
        pooled = split.images.reshape(-1, 16, 2, 16, 2, 3).mean((2, 4), np.float32)
        flat = pooled.reshape(len(split), -1) / 255 - 0.5
        return np.concatenate([flat, np.ones((len(split), 1), np.float32)], 1)

    x, targets = features(shapes.train), np.eye(10, dtype=np.float32)[shapes.train.labels]
    gram = x.T @ x + 10 * np.eye(x.shape[1], dtype=np.float32)  # ridge regression
    weights = np.linalg.solve(gram, x.T @ targets)
    predicted = (features(shapes.test) @ weights).argmax(1)
    assert (predicted == shapes.test.labels).mean() < 0.4


def test_draw_takes_its_randomness_from_the_generator():
    one, two = (draw("star", 5, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, draw("star", 5, np.random.default_rng(8)))
