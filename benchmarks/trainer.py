#!/usr/bin/env python3
"""The whole training loop against a bare forward-backward-step loop over the same model.

    python benchmarks/trainer.py

The bare loop steps over ready-made batches with the same fused SGD and does nothing else. Ours
loads and augments, guards against numbers that are not finite, schedules, counts, logs at the end
of every run and draws its bar; once more with a moving average of the weights. They take turns
every step (ResNet-50) or every 20 steps. All are float32 with channels_last; evaluations and
checkpoints are outside the clock.
"""

import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import arguments, ratio, report, side_by_side
from benchmarks.loop import make_trainer, silent, take_steps
from utils.models.resnet import ResNet
from utils.signals import Signals

BATCH = 64
CASES = {  # name -> (depth, width, steps of one run)
    "ResNet-50, batch 64": (50, 64, 1),
    "ResNet-18 of width 8, batch 64": (18, 8, 20),
}


def bare_loop(model, steps: int):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True
    )
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(BATCH, 3, 32, 32, generator=generator).to(
                memory_format=torch.channels_last
            ),
            torch.randint(0, 10, (BATCH,), generator=generator),
        )
        for _ in range(4)
    ]

    def run() -> float:
        model.train()
        started = time.perf_counter()
        for step in range(steps):
            inputs, targets = batches[step % len(batches)]
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return steps * BATCH / (time.perf_counter() - started)

    return run


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(options.threads)
    signals, results = Signals(), {}
    for case, (depth, width, steps) in CASES.items():
        model = ResNet(depth, 10, width).to(memory_format=torch.channels_last)
        with tempfile.TemporaryDirectory() as folder, silent():
            ours = make_trainer(copy.deepcopy(model), Path(folder, "ours"), signals, batch=BATCH)
            averaged = make_trainer(
                copy.deepcopy(model), Path(folder, "ema"), signals, batch=BATCH, ema_decay=0.999
            )
            runs = {
                "ours": lambda trainer=ours, steps=steps: take_steps(trainer, steps),
                "bare loop": bare_loop(model, steps),
                "ours with an average": lambda trainer=averaged, steps=steps: take_steps(
                    trainer, steps
                ),
            }
            figures = side_by_side(runs, options.repetitions)
        results[case] = {
            "samples_per_second": figures,
            "ratios": {
                "ours / bare loop": ratio(figures, "ours", "bare loop"),
                "with an average / ours": ratio(figures, "ours with an average", "ours"),
            },
        }
    report("trainer: the whole loop, fp32, channels_last", results, options.json)


if __name__ == "__main__":
    main()
