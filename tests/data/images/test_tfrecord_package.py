"""TFRecords that the package tfrecord has written."""

import numpy as np
import pytest
from data.images.picture_sources import load
from data.images.picture_trees import noise
from data.images.test_encoded import encoded
from PIL import Image

tfrecord = pytest.importorskip("tfrecord")


def test_we_read_its(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    pictures = [encoded(Image.fromarray(noise(8, seed)), "PNG") for seed in range(5)]
    for split, part in (("train", range(4)), ("val", [4])):
        writer = tfrecord.TFRecordWriter(str(folder / f"{split}.tfrecord"))
        for i in part:
            writer.write(
                {
                    "image/class/text": (b"a cat", "byte"),
                    "image/encoded": (pictures[i], "byte"),
                    "image/sizes": ([0.5, 2.0], "float"),
                    "image/class/label": ([i % 2, 7], "int"),  # the first one counts
                }
            )
        writer.close()
    data = load("tfrecord", folder)
    assert data.train.labels.tolist() == [0, 1, 0, 1] and data.test.labels.tolist() == [0]
    found = data.train.pictures.decode(np.arange(4))
    assert np.array_equal(found, [noise(8, seed) for seed in range(4)])
