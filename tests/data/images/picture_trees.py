"""Small trees of pictures for the tests of image folders."""

import numpy as np
import pytest
from PIL import Image

from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data
from utils.errors import UserError


def noise(side=8, seed=0, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (side, side, channels), dtype=np.uint8)


def make_tree(root, splits=("train", "test"), classes=("cat", "dog"), per_class=4, side=8):
    seed = 0
    for split in splits:
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(per_class):
                Image.fromarray(noise(side, seed)).save(folder / f"{index:03}.png")
                seed += 1
    return root


def load(tree, **settings):
    settings = {"cache_dir": tree.parent / "cache", "workers": 2, "progress": False, **settings}
    return load_image_data("imagefolder", PictureRequest(tree, **settings))


def refused(tree, *parts, **settings):
    with pytest.raises(UserError) as error:
        load(tree, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    return message
