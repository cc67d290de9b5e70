#!/usr/bin/env python3
"""What a checkpoint costs the training beside which it is written.

    python benchmarks/checkpoint.py

Blocks of steps of a ResNet-50 (188 MB of weights and momentum) with a checkpoint after the first
step of the block and without one, in turn. A block is longer than the writing, so that all of it
is inside. The share is that of one checkpoint a minute: seconds lost / 60. For comparison the
same with the writing waited for, as a plain loop does it.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import arguments, machine, silent
from benchmarks.loop import make_trainer, take_steps
from utils.launch.signals import Signals
from utils.models.resnet import ResNet

STEPS = 8  # of a block


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(options.threads)
    model = ResNet(50, 10).to(memory_format=torch.channels_last)
    kinds = ("none", "beside", "waited for")
    seconds = {kind: [] for kind in kinds}
    copies = []
    with tempfile.TemporaryDirectory() as folder, silent():
        trainer = make_trainer(
            model, Path(folder), Signals(), batch=64, precision="bf16", checkpoints=True
        )
        trainer.save_at_the_end = trainer.save
        trainer.save = lambda final=False: None  # not at the end of each block

        def block(kind: str) -> float:
            started = time.perf_counter()
            take_steps(trainer, 1)
            if kind != "none":
                before = time.perf_counter()
                trainer.save_at_the_end(final=kind == "waited for")
                if kind == "beside":
                    copies.append(time.perf_counter() - before)
            # One `fit` for the rest: it waits for the writing at its end, which is long over.
            take_steps(trainer, STEPS - 1)
            return time.perf_counter() - started

        for kind in kinds:
            block(kind)
        copies.clear()
        for repetition in range(options.repetitions):
            for kind in kinds if repetition % 2 == 0 else reversed(kinds):
                seconds[kind].append(block(kind))
    print("checkpoint: ResNet-50, batch 64, bf16")
    state = machine()
    print("  " + ", ".join(f"{key} {value}" for key, value in state.items() if value))
    print(f"  a block of {STEPS} steps   {statistics.median(seconds['none']):.2f} s")
    print(f"  taking the copy       {statistics.median(copies):.3f} s")
    for kind in kinds[1:]:
        lost = [a - b for a, b in zip(seconds[kind], seconds["none"], strict=True)]
        median = statistics.median(lost)
        print(
            f"  {kind:22}{median:.2f} s lost ({min(lost):.2f} to {max(lost):.2f} over "
            f"{len(lost)} pairs), {median / 60:.1%} at one a minute"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"machine": state, "seconds": seconds, "copies": copies}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
