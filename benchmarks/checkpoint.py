#!/usr/bin/env python3
"""How much writing a checkpoint in the background slows down training.

    python benchmarks/checkpoint.py

Blocks of steps of a ResNet-50 (188 MB of weights and momentum), in turn: without a checkpoint, with
one written in the background, with one that training waits for. A block is longer than the writing,
so the writing falls inside it. Percentages are for one checkpoint a minute: seconds lost / 60.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import (
    in_words,
    machine,
    median_and_range,
    parser,
    side_by_side,
    silent,
    spread,
    write_json,
)
from benchmarks.loop import make_trainer, take_steps
from utils.launch.signals import Signals
from utils.models.resnet import ResNet

STEPS = 8  # of a block


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    model = ResNet(50, 10).to(memory_format=torch.channels_last)
    copying = []
    with tempfile.TemporaryDirectory() as folder, silent():
        trainer = make_trainer(model, Path(folder), Signals(), precision="bf16", checkpoints=True)
        save = trainer.save
        trainer.save = lambda final=False: None  # not at the end of each block

        def block(kind: str) -> float:
            started = time.perf_counter()
            take_steps(trainer, 1)
            if kind != "none":
                before = time.perf_counter()
                save(final=kind == "waited for")
                if kind == "background":
                    copying.append(time.perf_counter() - before)
            # A single `fit` for the rest: it waits at its end for the writing, long done by then.
            take_steps(trainer, STEPS - 1)
            return time.perf_counter() - started

        kinds = ("none", "background", "waited for")
        runs = {kind: lambda kind=kind: block(kind) for kind in kinds}
        seconds = side_by_side(runs, options.repetitions)
    copying = copying[1:]  # without that of the warm-up
    print(f"checkpoint: ResNet-50, batch 64, bf16\n  {in_words(machine())}")
    print(f"  a block of {STEPS} steps: {spread(median_and_range(seconds['none']))} s")
    print(f"  copying stops the training for {spread(median_and_range(copying), 3)} s")
    for kind in kinds[1:]:
        pairs = zip(seconds[kind], seconds["none"], strict=True)
        lost = median_and_range(one - other for one, other in pairs)
        print(f"  {kind}: {spread(lost)} s lost, {lost['median'] / 60:.1%} at one a minute")
    if options.json:
        write_json(options.json, {"machine": machine(), "seconds": seconds, "copying": copying})


if __name__ == "__main__":
    main()
