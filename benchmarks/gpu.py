#!/usr/bin/env python3
"""The whole toolkit on one GPU, against the training loops that people write.

    python benchmarks/gpu.py --json runs/bench/gpu.json
    python benchmarks/gpu.py --json runs/bench/gpu.json --data_dir FOLDER --workers 8

The same as cpu.py at a GPU's sizes: ResNet-50 with CIFAR stem at batch 1024, a Transformer of six
layers of 512 at AG News lengths; peak memory is counted. At most 8 minutes. FOLDER has
train/<class>/ and test/<class>/ of real pictures, for the time to an accuracy.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.speed import Sizes, flags, run
from benchmarks.time_to_accuracy import Race

SIZES = Sizes(
    depth=50,
    picture_batch=1024,
    pictures=50_000,
    layers=6,
    dim=512,
    ffn=1024,
    text_batch=256,
    texts=60_000,
    turn_seconds=3,
    compile_seconds=90,
    precision="bf16",
    race=Race(depth=18, width=64, batch=500, epochs=5, pictures=50_000, lr=0.4, target=85),
)


def main(argv: list[str] | None = None) -> int:
    options = flags(__doc__, minutes=7.5, repetitions=3).parse_args(argv)
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU here; benchmarks/cpu.py measures a CPU", file=sys.stderr)
        return 2
    options.torch_device = torch.device("cuda", torch.cuda.current_device())
    run(options, SIZES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
