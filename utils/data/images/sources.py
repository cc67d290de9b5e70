"""The data sets of pictures.

A data set is a module in this folder and a line in `IMAGE_DATASETS`. Its function takes its name
there and a `PictureRequest`, and returns an `ImageData`. It raises UserError for settings without
effect on it (see `refuse_test_fraction`). Its splits may be any kind of `PictureSplit`; decoded
ones of another size than asked for are resized afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from ...place import resolve
from .image_data import ImageData, NoTestSet, PictureRequest

# Name -> "module:function", imported on use: `--dataset shapes` needs no decoder, `--help` nothing.
IMAGE_DATASETS = {
    "cifar10": "utils.data.images.cifar:load_cifar",
    "cifar100": "utils.data.images.cifar:load_cifar",
    "csv": "utils.data.images.csv_lists:load_csv",
    "fashion_mnist": "utils.data.images.mnist:load_mnist",
    "imagefolder": "utils.data.images.imagefolder:load_imagefolder",
    "mnist": "utils.data.images.mnist:load_mnist",
    "parquet": "utils.data.images.parquet:load_parquet",
    "shapes": "utils.data.images.shapes:load_shapes",
    "tar": "utils.data.images.shards:load_shards",
    "tfrecord": "utils.data.images.shards:load_shards",
}


# Of an imagefolder or csv without a test set, if --test_fraction does not say. Shards without one
# may have names that are not understood, so that they need the flag.
TEST_FRACTION = 0.2


def load_image_data(name: str, request: PictureRequest) -> ImageData:
    """Load the data set `name` of `IMAGE_DATASETS`.

    Raises:
        UserError: the data is missing, damaged or unsuitable, or a setting does not apply to it.
    """
    load = resolve(IMAGE_DATASETS[name])
    try:
        data: ImageData = load(name, request)
    except NoTestSet:
        data = load(name, replace(request, test_fraction=TEST_FRACTION))
        held_out = "a fifth is held out as test set (--test_fraction sets another part)"
        data = replace(data, source=f"{data.source}; {held_out}")
    if request.image_size in (None, data.train.shape[0]):
        return data
    from .cache import resized  # imports NumPy, which --help does without

    return resized(data, request)
