#!/usr/bin/env python3
"""Decoding while training: ours against torchvision's transforms in a DataLoader.

    python benchmarks/decoding.py
    python benchmarks/decoding.py --pictures 2000 --workers 2 --repetitions 3

JPEGs of smooth noise, 224 to 500 pixels a side, as a folder. Both crop random windows, resize them
to 224 (antialiased), flip, and hand over normalised float32 batches of 64, by equally many worker
processes, which are started before the clock. All files are in the page cache.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.made_up import CPU, MEAN, STD
from utils.augment.resized_crop import ResizedCrop
from utils.data.images.sources import load_image_data
from utils.data.workers import WorkerPool

SIDE, BATCH, CLASSES = 224, 64, 2


def write_tree(root: Path, count: int) -> None:
    """`count` files below train/, and a few below test/, which the data set must have."""
    rng = np.random.default_rng(0)
    for split, files in (("train", count), ("test", CLASSES)):
        for index in range(files):
            path = root / split / f"class{index % CLASSES}" / f"{index:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(224, 501, 2)
            noise = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
            smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            pixels = np.asarray(smooth) + rng.normal(0, 8, (height, width, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)


def torchvision_loader(root: Path, workers: int) -> DataLoader:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return DataLoader(
        ImageFolder(str(root / "train"), transform),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def speed(batches) -> float:
    started = time.perf_counter()
    samples = sum(len(batch[0]) for batch in batches)
    return samples / (time.perf_counter() - started)


def main() -> None:
    flags = parser(__doc__, repetitions=5, threads=1)
    flags.add_argument("--pictures", type=int, default=1200, help="files (default: 1200)")
    flags.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    pool = None
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "pictures"
        write_tree(tree, options.pictures)
        data = load_image_data(
            "imagefolder", data_dir=tree, cache_dir=Path(folder) / "cache", image_size=SIDE,
            decode="always",
        )  # fmt: skip
        if options.workers:
            pool = WorkerPool(options.workers, (BATCH + 1) * 3 * SIDE**2, warn=print)
        ours = data.train.loader(
            pool=pool, mean=MEAN, std=STD, batch_size=BATCH, device=CPU, augment=ResizedCrop(),
            shuffle=True,
        )  # fmt: skip
        theirs = torchvision_loader(tree, options.workers)
        epochs = iter(range(10**9))
        try:
            figures = side_by_side(
                {
                    "ours": lambda: speed(ours.epoch(next(epochs))),
                    "torchvision": lambda: speed(theirs),
                },
                options.repetitions,
            )
        finally:
            if pool is not None:
                pool.close()
    case = f"{options.pictures:,} JPEGs, {options.workers} workers"
    result = {"samples_per_second": figures, "ratios": ratios(figures, ("ours", "torchvision"))}
    report(f"decoding: {SIDE}x{SIDE}, batch {BATCH}", {case: result}, options.json)


if __name__ == "__main__":
    main()
