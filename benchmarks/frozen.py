#!/usr/bin/env python3
"""Training the head of a frozen ResNet-18 against training all of it.

    python benchmarks/frozen.py

The same loop, pictures of 32x32 and batches of 64, in turns of a few steps; fp32 and bf16.
"""

import copy
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side, silent
from benchmarks.loop import make_trainer, take_steps
from utils.launch.signals import Signals
from utils.models.resnet import ResNet

STEPS = {"all": 3, "frozen": 9}  # of a turn


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    signals, results = Signals(), {}
    model = ResNet(18, 10).to(memory_format=torch.channels_last)
    for precision in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder, silent():
            runs = {}
            for name, steps in STEPS.items():
                trainer = make_trainer(
                    copy.deepcopy(model), Path(folder, name), signals, precision=precision,
                    frozen=name == "frozen",
                )  # fmt: skip
                runs[name] = partial(take_steps, trainer, steps)
            figures = side_by_side(runs, options.repetitions)
        results[f"ResNet-18, batch 64, {precision}"] = {
            "samples_per_second": figures,
            "ratios": ratios(figures, ("frozen", "all")),
        }
    report("Frozen backbone against full training", results, options.json)


if __name__ == "__main__":
    main()
