"""TFRecords go to and fro between this project and the package tfrecord."""

import numpy as np
import pytest
from data.images.picture_sources import load
from data.images.picture_trees import make_tree, noise
from data.images.test_encoded import encoded
from PIL import Image

from utils.data.images import pack

tfrecord = pytest.importorskip("tfrecord")
KINDS = {"image/encoded": "byte", "image/class/label": "int"}


def test_it_reads_ours(tmp_path):
    tree = make_tree(tmp_path / "pictures", per_class=3)
    pack.pack(tree, tmp_path / "shards", "tfrecord", 10**6, progress=False)
    (shard,) = (tmp_path / "shards").glob("train-*")
    found = list(tfrecord.tfrecord_loader(str(shard), None, KINDS))
    files = {path.read_bytes(): path.parent.name for path in tree.glob("train/*/*")}
    assert {bytes(record["image/encoded"]) for record in found} == files.keys()
    for record in found:
        name = files[bytes(record["image/encoded"])]
        assert record["image/class/label"].tolist() == [("cat", "dog").index(name)]


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
