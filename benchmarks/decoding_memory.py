#!/usr/bin/env python3
"""Whether memory grows over a long epoch of pictures that are decoded while training.

    python benchmarks/decoding_memory.py
    python benchmarks/decoding_memory.py --pictures 5000

The pictures are hard links to 600 JPEGs, 224 to 500 pixels a side, all in the page cache. After
each tenth of an epoch: the memory that the training process and its two workers have for themselves
(RssAnon). A line for each decoder that is installed.
"""

import argparse
import sys
import tempfile
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine, write_json
from benchmarks.encoded import load, our_loader, our_pool, readers, write_tree
from utils.machine.host_memory import keep_freed_memory

DIFFERENT, WORKERS, PARTS = 600, 2, 10


def own_megabytes() -> float:
    """Of this process and its workers."""
    total = 0
    for pid in ("self", *(worker.pid for worker in active_children())):
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.split("RssAnon:")[1].split()[0])  # kB
    return total / 1e3


def memory_over_an_epoch(data, count: int) -> dict[str, list[float]]:
    """Decoder -> megabytes after each part of the epoch."""
    found = {}
    for name, reader in readers().items():
        pool = our_pool(WORKERS)
        loader = our_loader(data, reader, pool)
        steps = count // loader.batch_size
        after = np.linspace(0, steps, PARTS + 1)[1:].astype(int).tolist()
        found[name] = []
        try:
            for step, _ in zip(range(1, steps + 1), loader.epoch(0), strict=False):
                if step in after:
                    found[name].append(own_megabytes())
        finally:
            pool.close()
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--pictures", type=int, default=50_000, help="(default: 50,000)")
    flags.add_argument("--json", type=Path, help="also write the figures to this file")
    options = flags.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "pictures"
        write_tree(tree, options.pictures, DIFFERENT)
        megabytes = memory_over_an_epoch(load(tree), options.pictures)
    print(f"memory of an epoch of {options.pictures:,} JPEGs\n  {in_words(machine())}")
    for name, values in megabytes.items():
        print(f"  {name}, MB after each tenth: " + " ".join(f"{value:.0f}" for value in values))
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "megabytes": megabytes})


if __name__ == "__main__":
    main()
