#!/usr/bin/env python3
"""Our loader against torchvision's transforms in a DataLoader with two workers.

    python benchmarks/loader.py
    python benchmarks/loader.py --only files --pictures 20000 --repetitions 1

Both crop with 4 pixels of padding, flip, and hand over batches of 256 pictures. Worker processes
are started before the clock.

In memory: 20,000 pictures of 32x32, as PIL images for torchvision and as one array for ours; once
normalised to float32, once kept in uint8.

From files: 100,000 pictures of 64x64 in ten class folders, as JPEG files of quality 90. They are
hard links to 2,000 different files of smooth noise, which are quicker to write; each link is read
and decoded like a file of its own. torchvision reads them by `ImageFolder` in two workers. Ours
decodes them once into its cache (timed apart) and reads that by two workers of its own. Ours is
measured over an epoch, torchvision over a quarter of one, since an epoch takes it a minute or two.
All files are in the page cache.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.made_up import CPU, MEAN, STD, pictures
from utils.augment.crop_flip import CropFlip
from utils.data.images.image_data import PictureRequest
from utils.data.images.loader import ImageLoader
from utils.data.images.sources import load_image_data
from utils.data.workers import WorkerPool

SAMPLES, BATCH, WORKERS = 20_000, 256, 2
SIDE, CLASSES, DISTINCT = 64, 10, 2000  # of the pictures in files
PART = 0.25  # of an epoch of files: what torchvision is measured over


class Pictures(Dataset):
    """PIL images in memory, transformed one by one, as torchvision's CIFAR10 does it."""

    def __init__(self, images, labels, transform):
        self.images = [Image.fromarray(image) for image in images]
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def torchvision_loader(dataset, samples: int | None = None) -> DataLoader:
    """`samples` of the data set in random order; None: all."""
    return DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=RandomSampler(dataset, num_samples=samples),
        num_workers=WORKERS,
        persistent_workers=True,
    )


def torchvision_transform(side: int, to_tensor: list):
    return transforms.Compose(
        [transforms.RandomCrop(side, padding=4), transforms.RandomHorizontalFlip(), *to_tensor]
    )


def torchvision_epoch(images, labels, to_tensor: list):
    dataset = Pictures(images, labels, torchvision_transform(32, to_tensor))
    loader = torchvision_loader(dataset)
    return lambda: _speed(loader)


def our_epoch(images, labels, keep_uint8=False, pool=None):
    height, width = images.shape[1:3]
    loader = ImageLoader(
        images, labels, mean=MEAN, std=STD, batch_size=BATCH, device=CPU,
        augment=CropFlip(height, width), shuffle=True, pool=pool,
    )  # fmt: skip
    if keep_uint8:
        loader.normalize = lambda pixels: pixels
    epochs = iter(range(10**9))
    return lambda: _speed(loader.epoch(next(epochs)))


def _speed(batches) -> float:
    started = time.perf_counter()
    samples = 0
    for batch in batches:
        samples += len(batch[0])
    return samples / (time.perf_counter() - started)


def from_memory(repetitions: int) -> dict:
    images, labels = pictures(SAMPLES, np.random.default_rng(0))
    normalised = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    cases = {
        "in memory: crop, flip, normalise to float32": {
            "ours": our_epoch(images, labels),
            "torchvision": torchvision_epoch(images, labels, normalised),
        },
        "in memory: crop, flip, in uint8": {
            "ours": our_epoch(images, labels, keep_uint8=True),
            "torchvision": torchvision_epoch(images, labels, [transforms.PILToTensor()]),
        },
    }
    return {case: _compare(runs, repetitions) for case, runs in cases.items()}


def from_files(count: int, repetitions: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "pictures"
        _write_tree(tree, count)
        started = time.perf_counter()
        request = PictureRequest(tree, Path(folder) / "cache", image_size=SIDE)
        data = load_image_data("imagefolder", request)
        decoding = time.perf_counter() - started
        assert len(data.train) == count and isinstance(data.train.images, np.memmap)
        normalised = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        dataset = ImageFolder(str(tree / "train"), torchvision_transform(SIDE, normalised))
        # A sampler of a part, not an interrupted epoch: the workers of that would still be reading
        # while ours are measured.
        theirs = torchvision_loader(dataset, int(PART * count))
        pool = WorkerPool(WORKERS, (BATCH + 1) * 3 * SIDE**2, warn=print)
        try:
            runs = {
                "ours": our_epoch(data.train.images, data.train.labels, pool=pool),
                "torchvision": lambda: _speed(theirs),
            }
            result = _compare(runs, repetitions)
        finally:
            pool.close()
    result["seconds_decoding_once"] = decoding
    case = f"memory map, {count:,} pictures of {SIDE}x{SIDE}, {WORKERS} workers"
    return {f"{case} (decoded once in {decoding:.0f} s)": result}


def _write_tree(root: Path, training: int) -> None:
    """`training` files below train/, and a small test/, which the data set must have."""
    rng = np.random.default_rng(0)
    originals = root.parent / "originals"
    originals.mkdir()
    for index in range(DISTINCT):
        noise = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
            originals / f"{index}.jpg", quality=90
        )
    for split, count in (("train", training), ("test", CLASSES)):
        for label in range(CLASSES):
            (root / split / f"class{label}").mkdir(parents=True)
        for index in range(count):
            path = root / split / f"class{index % CLASSES}" / f"{index:07}.jpg"
            os.link(originals / f"{index % DISTINCT}.jpg", path)


def _compare(runs: dict, repetitions: int) -> dict:
    figures = side_by_side(runs, repetitions)
    return {
        "samples_per_second": figures,
        "ratios": ratios(figures, ("ours", "torchvision")),
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--only", choices=("memory", "files"), help="(default: both)")
    flags.add_argument("--pictures", type=int, default=100_000, help="files (default: 100,000)")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    if options.only != "files":
        results |= from_memory(options.repetitions)
    if options.only != "memory":
        results |= from_files(options.pictures, options.repetitions)
    report(f"loader: batch {BATCH}", results, options.json)


if __name__ == "__main__":
    main()
