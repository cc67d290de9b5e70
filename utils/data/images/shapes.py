"""Built-in synthetic pictures: ten kinds of shapes, 32x32 RGB, drawn by arithmetic.

No file and no network is needed. Every machine draws the same bytes: the seed is fixed, and the
drawing uses only operations that IEEE 754 rounds exactly (no sine, no exponential). A horizontal
flip or a shift by 4 pixels does not change the class. Place, size, colours and the sign of the
contrast are random, so that a linear classifier can hardly tell the classes apart.
"""

from __future__ import annotations

import math

import numpy as np

from .decoded import DecodedSplit, channel_statistics, content_fingerprint
from .image_data import ImageData, PictureRequest, refuse_test_fraction

SIDE = 32
TRAIN_PER_CLASS, TEST_PER_CLASS = 500, 100
_SEED = 20240229


def load_shapes(name: str, request: PictureRequest) -> ImageData:
    """5,000 training and 1,000 test pictures with equally many of each class, always the same."""
    refuse_test_fraction(name, request)
    train = draw_split(TRAIN_PER_CLASS, np.random.default_rng(_SEED))
    test = draw_split(TEST_PER_CLASS, np.random.default_rng(_SEED + 1))
    classes, statistics = list(SHAPES), channel_statistics(train.images)
    fingerprint = content_fingerprint(classes, {"train": train, "test": test})
    source = "built-in synthetic data"
    return ImageData(name, classes, *statistics, train, test, fingerprint, source, synthetic=True)


def draw_split(per_class: int, rng: np.random.Generator) -> DecodedSplit:
    """`per_class` pictures of every class, in random order."""
    labels = rng.permutation(np.repeat(np.arange(len(SHAPES), dtype=np.int64), per_class))
    images = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    for label, name in enumerate(SHAPES):
        images[labels == label] = draw(name, per_class, rng)
    return DecodedSplit(images, labels)


def draw(name: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """`n` pictures of one class: (n, SIDE, SIDE, 3) uint8."""
    distance, max_tilt = SHAPES[name]

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return low + (high - low) * rng.random((n, *shape), dtype=np.float32)

    # |offset| + radius <= 12: a shift by 4 pixels leaves the shape inside, except for tips.
    radius = uniform(5.5, 9.5, 1, 1)
    middle = (SIDE - 1) / 2
    x = np.arange(SIDE, dtype=np.float32) - middle - uniform(-1, 1, 1, 1) * (12 - radius)
    y = np.arange(SIDE, dtype=np.float32)[:, None] - middle - uniform(-1, 1, 1, 1) * (12 - radius)
    tilt = uniform(-max_tilt, max_tilt, 1, 1)  # tangent of the angle
    norm = np.sqrt(1 + tilt * tilt) * radius
    u, v = (x + tilt * y) / norm, (y - tilt * x) / norm  # (n, SIDE, SIDE), in units of the radius
    cover = np.clip(0.5 - distance(u, v) * radius, 0, 1)[..., None]  # fraction of each pixel

    # In each channel the shape is brighter than a dark background and darker than a bright one.
    # Averaged over pictures both have the same mean, of which a linear classifier learns nothing.
    back = uniform(0.1, 0.9, 1, 1, 3)
    step = uniform(0.2, 0.5, 1, 1, 3)
    front = np.where(back < 0.5, back + step, back - step)
    ramp = np.linspace(-1, 1, SIDE, dtype=np.float32)[:, None]  # (SIDE, 1)
    slope_x, slope_y = uniform(-0.15, 0.15, 1, 1, 3), uniform(-0.15, 0.15, 1, 1, 3)
    picture = back + slope_x * ramp + slope_y * ramp[:, None]  # (n, SIDE, SIDE, 3)
    picture += cover * (front - picture)
    picture += uniform(-0.12, 0.12, SIDE, SIDE, 3)
    return (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)


# Signed distances to shapes of radius about 1 around the origin, negative inside; coordinates are
# u (rightwards) and v (downwards). All are symmetric under u -> -u.


def _circle(u, v):
    return np.sqrt(u * u + v * v) - 0.9


def _ring(u, v):
    return abs(np.sqrt(u * u + v * v) - 0.7) - 0.25


def _box(u, v, half_width=0.8, half_height=0.8):
    return np.maximum(abs(u) - half_width, abs(v) - half_height)


def _triangle(u, v):
    return np.maximum(v, math.sqrt(0.75) * abs(u) - 0.5 * v) - 0.55


def _cross(u, v):
    return np.minimum(_box(u, v, 0.95, 0.3), _box(u, v, 0.3, 0.95))


def _diamond(u, v):
    return (abs(u) + 0.8 * abs(v) - 0.8) * math.sqrt(0.5)


def _star(u, v):
    """Five points, one upwards: folds the plane onto half a point, which has one straight edge."""
    cos, sin = math.cos(math.pi / 5), math.sin(math.pi / 5)
    x, y = abs(u), -v
    for mirror in (1, -1):  # reflect in the lines at right angles to (mirror * cos, -sin)
        overlap = 2 * np.maximum(mirror * cos * x - sin * y, 0)
        x, y = x - overlap * mirror * cos, y + overlap * sin
    x = abs(x)
    # The edge runs from the tip (0, 1.05) to the inner corner, at radius 0.45 and 36 degrees.
    dx, dy = 0.45 * sin, 0.45 * cos - 1.05
    return (-x * dy + (y - 1.05) * dx) / math.hypot(dx, dy)


def _stripes(w, period):
    """Stripes at right angles to w, half a period wide, one of them centred on the origin."""
    cycles = w / period
    return (abs(cycles - np.floor(cycles + 0.5)) - 0.25) * period


def _horizontal_bars(u, v):
    return np.maximum(_box(u, v, 0.9, 0.9), _stripes(v, 0.72))


def _vertical_bars(u, v):
    return np.maximum(_box(u, v, 0.9, 0.9), _stripes(u, 0.72))


def _checkerboard(u, v):
    """Three by three: inside where either a horizontal or a vertical bar is, but not both."""
    a, b = _stripes(u, 1.2), _stripes(v, 1.2)
    return np.maximum(_box(u, v, 0.9, 0.9), np.maximum(np.minimum(a, b), -np.maximum(a, b)))


# Class -> (signed distance, largest tangent of its tilt), sorted like the classes of a folder.
SHAPES = {
    "checkerboard": (_checkerboard, 0.15),
    "circle": (_circle, 0.0),
    "cross": (_cross, 0.2),
    "diamond": (_diamond, 0.15),
    "horizontal_bars": (_horizontal_bars, 0.15),
    "ring": (_ring, 0.0),
    "square": (_box, 0.15),
    "star": (_star, 0.3),
    "triangle": (_triangle, 0.2),
    "vertical_bars": (_vertical_bars, 0.15),
}
