#!/usr/bin/env python3
"""Our loader against torchvision's transforms in a DataLoader with two workers.

    python benchmarks/loader.py
    python benchmarks/loader.py --only files --pictures 20000 --repetitions 1

Both crop with 4 pixels of padding, flip, and hand over batches of 256 pictures. Worker processes
are started before the clock.

In memory: 20,000 pictures of 32x32, as PIL images for torchvision and as one array for ours. In
one case they are normalised to float32, in the other kept in uint8.

From files: 100,000 pictures of 64x64 in ten class folders, as JPEG files of quality 90. They are
hard links to 2,000 different files of smooth noise, so that writing them does not take longer than
the measurement; each link is read and decoded like a file of its own. torchvision reads them by
`ImageFolder` in two workers. Ours has decoded them into its cache once, which is not counted but
stated, and reads that by two workers of its own. Ours is measured over an epoch, torchvision over
a quarter of one, since an epoch of it takes a minute or two; all files are in the page cache.
"""

import argparse
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
from benchmarks.common import arguments, ratio, report, side_by_side
from utils.augment.crop_flip import CropFlip
from utils.data.images.loader import ImageLoader
from utils.data.images.sources import load_image_data
from utils.data.workers import WorkerPool

SAMPLES, BATCH, WORKERS = 20_000, 256, 2
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SIDE, CLASSES, DISTINCT = 64, 10, 2000  # of the pictures in files
PART = 0.25  # of an epoch, that torchvision is measured over where the pictures lie in files


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
        images, labels, mean=MEAN, std=STD, batch_size=BATCH, device=torch.device("cpu"),
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
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, SAMPLES)
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


def from_files(pictures: int, repetitions: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "pictures"
        _write_tree(tree, pictures)
        started = time.perf_counter()
        data = load_image_data(
            "imagefolder", data_dir=tree, cache_dir=Path(folder) / "cache", image_size=SIDE
        )
        decoding = time.perf_counter() - started
        assert len(data.train) == pictures and isinstance(data.train.images, np.memmap)
        normalised = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        dataset = ImageFolder(str(tree / "train"), torchvision_transform(SIDE, normalised))
        # A sampler of a part, not an epoch that is broken off: workers that were to read on would
        # still be at it while ours are measured.
        theirs = torchvision_loader(dataset, int(PART * pictures))
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
    case = f"memory map, {pictures:,} pictures of {SIDE}x{SIDE}, {WORKERS} workers"
    return {f"{case} (decoded once in {decoding:.0f} s)": result}


def _write_tree(root: Path, pictures: int) -> None:
    """`pictures` files below train/, and a small test/, which the data set must have."""
    rng = np.random.default_rng(0)
    originals = root.parent / "originals"
    originals.mkdir()
    for index in range(DISTINCT):
        noise = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
            originals / f"{index}.jpg", quality=90
        )
    for split, count in (("train", pictures), ("test", CLASSES)):
        for label in range(CLASSES):
            (root / split / f"class{label}").mkdir(parents=True)
        for index in range(count):
            path = root / split / f"class{index % CLASSES}" / f"{index:07}.jpg"
            os.link(originals / f"{index % DISTINCT}.jpg", path)


def _compare(runs: dict, repetitions: int) -> dict:
    figures = side_by_side(runs, repetitions)
    return {
        "samples_per_second": figures,
        "ratios": {"ours / torchvision": ratio(figures, "ours", "torchvision")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", choices=("memory", "files"))
    parser.add_argument("--pictures", type=int, default=100_000)
    own, sys.argv[1:] = parser.parse_known_args()  # the others are common to all benchmarks
    options = arguments(
        f"{__doc__.splitlines()[0]} Also: --only memory or files, --pictures N (in files)"
    )
    torch.set_num_threads(options.threads)
    results = {}
    if own.only != "files":
        results |= from_memory(options.repetitions)
    if own.only != "memory":
        results |= from_files(own.pictures, options.repetitions)
    report(f"loader: batch {BATCH}", results, options.json)


if __name__ == "__main__":
    main()
