#!/usr/bin/env python3
"""Decoding while training: ours against torchvision's transforms in a DataLoader.

    python benchmarks/decoding.py
    python benchmarks/decoding.py --pictures 2000 --workers 2 --repetitions 3

JPEGs of smooth noise, 224 to 500 pixels a side, as a folder. All crop random windows, resize them
to 224 (antialiased), flip, and hand over normalised float32 batches of 64, by equally many worker
processes, which are started before the clock. All files are in the page cache. Ours is measured
with Pillow, and with simplejpeg where it is installed.
The process that receives the batches keeps freed memory, as in training, whoever makes them.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.encoded import BATCH, SIDE, load, our_loader, our_pool, readers, write_tree
from benchmarks.made_up import MEAN, STD
from utils.machine.host_memory import keep_freed_memory


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
    keep_freed_memory()
    with ExitStack() as stack:
        tree = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pictures"
        write_tree(tree, options.pictures)
        data, epochs = load(tree), iter(range(10**9))
        runs = {}
        for name, reader in readers().items():
            if (pool := our_pool(options.workers)) is not None:
                stack.callback(pool.close)
            loader = our_loader(data, reader, pool)
            runs[name] = lambda loader=loader: speed(loader.epoch(next(epochs)))
        theirs = torchvision_loader(tree, options.workers)
        runs["torchvision"] = lambda: speed(theirs)
        figures = side_by_side(runs, options.repetitions)
    case = f"{options.pictures:,} JPEGs, {options.workers} workers"
    against = [(name, "torchvision") for name in runs if name != "torchvision"]
    result = {"samples_per_second": figures, "ratios": ratios(figures, *against)}
    report(f"decoding: {SIDE}x{SIDE}, batch {BATCH}", {case: result}, options.json)


if __name__ == "__main__":
    main()
