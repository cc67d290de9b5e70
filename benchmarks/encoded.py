"""What the benchmarks of pictures that are decoded while training share: JPEGs, our loaders."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.made_up import CPU, MEAN, STD
from benchmarks.pillow_reader import PillowReader
from utils.augment.resized_crop import ResizedCrop
from utils.data.images.image_data import ImageData, PictureRequest
from utils.data.images.loader import EncodedLoader
from utils.data.images.records import RecordReader
from utils.data.images.sources import load_image_data
from utils.data.workers import WorkerPool

SIDE, BATCH, CLASSES = 224, 64, 2


def readers() -> dict[str, type[RecordReader]]:
    """Our decoders, as far as their packages are installed."""
    found: dict[str, type[RecordReader]] = {"ours": PillowReader}
    if importlib.util.find_spec("simplejpeg"):
        found["ours with simplejpeg"] = RecordReader
    return found


def write_tree(root: Path, count: int, different: int | None = None) -> None:
    """`count` JPEGs of smooth noise, 224 to 500 pixels a side, below train/, and a few below test/,
    which the data set must have.

    Args:
        different: how many of them have pixels of their own; the others are hard links to these.
    """
    rng = np.random.default_rng(0)
    written: list[Path] = []
    for split, files in (("train", count), ("test", CLASSES)):
        for index in range(files):
            path = root / split / f"class{index % CLASSES}" / f"{index:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if different is not None and len(written) >= different:
                os.link(written[index % different], path)
                continue
            height, width = rng.integers(224, 501, 2)
            noise = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
            smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            pixels = np.asarray(smooth) + rng.normal(0, 8, (height, width, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)
            written.append(path)


def load(tree: Path) -> ImageData:
    cache = tree.parent / "cache"
    return load_image_data(
        "imagefolder", PictureRequest(tree, cache, image_size=SIDE, decode="always")
    )


def our_pool(workers: int) -> WorkerPool | None:
    return WorkerPool(workers, (BATCH + 1) * 3 * SIDE**2, warn=print) if workers else None


def our_loader(
    data: ImageData, reader: type[RecordReader], pool: WorkerPool | None
) -> EncodedLoader:
    """As in training with --crop resized."""
    return data.train.loader(
        reader=reader, pool=pool, mean=MEAN, std=STD, batch_size=BATCH, device=CPU,
        augment=ResizedCrop(), shuffle=True,
    )  # fmt: skip
