#!/usr/bin/env python3
"""The whole toolkit on one GPU, against the training loops that people write.

    python benchmarks/gpu.py --json runs/bench/gpu.json
    python benchmarks/gpu.py --json runs/bench/gpu.json --data_dir FOLDER --workers 8

The same as cpu.py at a GPU's sizes: ResNet-50 with CIFAR stem at batch 1024, a Transformer of six
layers of 512 at AG News lengths; peak memory is counted, CUDA graphs and ours with --compile are
among the contenders, and so is a loop with Apex's optimizer where Apex is installed with its CUDA
extension. At most 8 minutes. FOLDER has train/<class>/ and test/<class>/ of real pictures, for the
time to an accuracy.

Needs requirements.txt and torchvision, whose transforms are part of the comparison. Without
matplotlib there is no plot.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    import torch

    from benchmarks.cases import Sizes
    from benchmarks.speed import flags, run
    from benchmarks.time_to_accuracy import Race
    from utils.errors import UserError
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")

SIZES = Sizes(
    depth=50,
    picture_batch=1024,
    pictures=50 * 1024,
    layers=6,
    dim=512,
    ffn=1024,
    text_batch=256,
    texts=240 * 256,
    turn_seconds=2,
    compile_seconds=45,
    precision="bf16",
    race=Race(depth=18, width=64, batch=500, epochs=5, pictures=50_000, lr=0.4, target=85),
)


def main(argv: list[str] | None = None) -> int:
    options = flags(__doc__, minutes=7.5, repetitions=3).parse_args(argv)
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU here; benchmarks/cpu.py measures a CPU", file=sys.stderr)
        return 2
    options.torch_device = torch.device("cuda", torch.cuda.current_device())
    try:
        run(options, SIZES)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
