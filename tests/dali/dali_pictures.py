"""Small sets of JPEGs, and of whatever else people have."""

import io

import numpy as np
from PIL import Image

from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data


def smooth(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture with details that an 8x8 block of a JPEG does not average out."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noisy = image + rng.normal(0, 8, image.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_photos(root, count: int = 24, least: int = 40, most: int = 90, test: int = 4):
    """`count` JPEGs of several sizes below train/, and `test` below test/, of two classes."""
    rng = np.random.default_rng(0)
    for split, files in (("train", count), ("test", test)):
        for index in range(files):
            path = root / split / ("cat", "dog")[index % 2] / f"{index:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(least, most, 2).tolist()
            path.write_bytes(encoded(smooth(height, width, index), quality=90))
    return root


def load(root, size: int = 32, **settings):
    request = PictureRequest(
        root, root.parent / "cache", size, decode="always", workers=1, progress=False, **settings
    )
    return load_image_data("imagefolder", request)
