#!/usr/bin/env python3
"""Our loader against torchvision's transforms in a DataLoader with two workers.

    python benchmarks/loader.py

Both crop with 4 pixels of padding, flip, and hand over batches of 256 pictures of 32x32. In one
case they are normalised to float32, in the other kept in uint8. The pictures lie in memory, as PIL
images for torchvision and as one array for ours. Worker processes are started before the clock.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import arguments, ratio, report, side_by_side
from utils.augment.crop_flip import CropFlip
from utils.data.loader import ImageLoader

SAMPLES, BATCH, WORKERS = 20_000, 256, 2
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Pictures(Dataset):
    """PIL images in memory, transformed one by one, as torchvision's CIFAR10 does it."""

    def __init__(self, images, labels, transform):
        self.images = [Image.fromarray(image) for image in images]
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def torchvision_epoch(images, labels, to_tensor: list):
    transform = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *to_tensor]
    )
    loader = DataLoader(
        Pictures(images, labels, transform),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    return lambda: _speed(loader)


def our_epoch(images, labels, keep_uint8=False):
    loader = ImageLoader(
        images, labels, mean=MEAN, std=STD, batch_size=BATCH, device=torch.device("cpu"),
        augment=CropFlip(32, 32), shuffle=True,
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


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, SAMPLES)
    normalised = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    cases = {
        "crop, flip, normalise to float32": {
            "ours": our_epoch(images, labels),
            "torchvision": torchvision_epoch(images, labels, normalised),
        },
        "crop, flip, in uint8": {
            "ours": our_epoch(images, labels, keep_uint8=True),
            "torchvision": torchvision_epoch(images, labels, [transforms.PILToTensor()]),
        },
    }
    results = {}
    for case, runs in cases.items():
        figures = side_by_side(runs, options.repetitions)
        results[case] = {
            "samples_per_second": figures,
            "ratios": {"ours / torchvision": ratio(figures, "ours", "torchvision")},
        }
    report(f"loader: {SAMPLES:,} pictures, batch {BATCH}", results, options.json)


if __name__ == "__main__":
    main()
