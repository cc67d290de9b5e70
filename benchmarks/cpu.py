#!/usr/bin/env python3
"""The whole toolkit on a CPU, against the training loops that people write.

    make bench
    python benchmarks/cpu.py --json runs/bench/cpu.json --data_dir FOLDER

ResNet-50 with CIFAR stem and a Transformer at AG News lengths, by the usual loop (torchvision's
transforms, DataLoader, fp32, NCHW; texts padded), the same with bf16 autocast and channels_last,
with torch.compile, and by ours with each of its switches. They take turns. FOLDER has
train/<class>/ and test/<class>/ of real pictures, for the time to an accuracy. At most 15 minutes
on two cores; what does not fit into --minutes is left out, with a line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    import torch

    from benchmarks.cases import Sizes
    from benchmarks.speed import flags, run
    from benchmarks.time_to_accuracy import Race
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")

SIZES = Sizes(
    depth=50,
    picture_batch=64,
    pictures=63 * 64,
    layers=4,
    dim=256,
    ffn=512,
    text_batch=64,
    texts=125 * 64,
    turn_seconds=4,
    compile_seconds=60,
    precision="bf16",
    race=Race(depth=18, width=16, batch=64, epochs=3, pictures=9600, lr=0.1, target=45),
)


def main(argv: list[str] | None = None) -> None:
    options = flags(__doc__, minutes=14, repetitions=6).parse_args(argv)
    options.torch_device = torch.device("cpu")
    run(options, SIZES)


if __name__ == "__main__":
    main()
