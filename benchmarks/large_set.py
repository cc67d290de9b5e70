#!/usr/bin/env python3
"""A large set of JPEGs: how long it takes to index, and whether memory grows over an epoch.

    python benchmarks/large_set.py
    python benchmarks/large_set.py --only memory --pictures 5000

The files are 100,000 hard links to 600 JPEGs, 224 to 500 pixels a side, all in the page cache.

index: the first load_image_data, which reads all headers and decodes 4,096 pictures for mean and
standard deviation, and the next one, which maps the index.

memory: in an epoch of 50,000 of them, the memory that the training process and its two workers have
for themselves (RssAnon), after each tenth of the epoch. A line for each decoder.
"""

import argparse
import sys
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine, write_json
from benchmarks.encoded import load, our_loader, our_pool, readers, write_tree
from utils.machine.host_memory import keep_freed_memory

DIFFERENT, WORKERS, PARTS = 600, 2, 10


def indexing_seconds(tree: Path) -> dict[str, float]:
    seconds = {}
    for name in ("first", "next"):
        started = time.perf_counter()
        load(tree)
        seconds[name] = time.perf_counter() - started
    return seconds


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
    flags.add_argument("--only", choices=("index", "memory"), help="(default: both)")
    flags.add_argument("--files", type=int, default=100_000, help="(default: 100,000)")
    flags.add_argument("--pictures", type=int, default=50_000, help="in the epoch of memory")
    flags.add_argument("--json", type=Path, help="also write the figures to this file")
    options = flags.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "pictures"
        write_tree(tree, options.files, DIFFERENT)
        if options.only != "memory":
            results["seconds"] = indexing_seconds(tree)
        if options.only != "index":
            results["megabytes"] = memory_over_an_epoch(load(tree), options.pictures)
    print(f"a large set of JPEGs\n  {in_words(machine())}")
    for name, seconds in results.get("seconds", {}).items():
        print(f"  {name} load of {options.files:,} files: {seconds:.1f} s")
    for name, values in results.get("megabytes", {}).items():
        print(f"  {name}, MB after each tenth: " + " ".join(f"{value:.0f}" for value in values))
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "results": results})


if __name__ == "__main__":
    main()
