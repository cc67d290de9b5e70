#!/usr/bin/env python3
"""The whole training loop against a bare forward-backward-step loop over the same model.

    python benchmarks/trainer.py

The bare loop steps over ready-made batches with the same fused SGD and does nothing else. Ours
loads and augments, guards against numbers that are not finite, schedules, counts, logs at the end
of every run and draws its bar. The two take turns every step (ResNet-50) or every 20 steps. Both
are float32 with channels_last; evaluations and checkpoints are outside the clock.
"""

import copy
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import arguments, ratio, report, side_by_side
from utils.augment.crop_flip import CropFlip
from utils.data.loader import ImageLoader
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.optim.schedules import Schedule
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.signals import Signals
from utils.training.checkpoint import Checkpoints
from utils.training.objective import Classification, Precision
from utils.training.trainer import Trainer

BATCH = 64
CASES = {  # name -> (depth, width, steps of one run)
    "ResNet-50, batch 64": (50, 64, 1),
    "ResNet-18 of width 8, batch 64": (18, 8, 20),
}
EPOCH = 400  # steps
CPU = torch.device("cpu")


class NoCheckpoints(Checkpoints):
    """Writing them is not what is measured here, and would disturb it."""

    def save(self, checkpoint, best_step=None):
        return self.folder


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


def our_loop(model, steps: int, folder: Path, signals: Signals):
    rng = np.random.default_rng(0)
    loader = ImageLoader(
        rng.integers(0, 256, (EPOCH * BATCH, 32, 32, 3), dtype=np.uint8),
        rng.integers(0, 10, EPOCH * BATCH),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        batch_size=BATCH,
        device=CPU,
        augment=CropFlip(32, 32),
        shuffle=True,
    )
    console = Console()
    console.live = True  # with its bar, wherever that goes
    precision = Precision("fp32", CPU)

    trainer = Trainer(
        model=model,
        objective=Classification(model, precision),
        optimizer=build_optimizer("sgd", model, lr=0.01, weight_decay=5e-4),
        schedule=Schedule("cosine", 10**6, 0),
        loader=loader,
        precision=precision,
        total_steps=0,
        evaluate=lambda: None,
        eval_split="test",
        eval_every=0,
        console=console,
        metrics=MetricsLog(folder / "metrics.jsonl"),
        checkpoints=NoCheckpoints(folder / "checkpoints"),
        signals=signals,
    )

    def run() -> float:
        """So many more steps of the same run."""
        before = trainer.progress.seconds_training
        trainer.total_steps += steps
        trainer.fit()
        return steps * BATCH / (trainer.progress.seconds_training - before)

    return run


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(options.threads)
    signals, results = Signals(), {}
    for case, (depth, width, steps) in CASES.items():
        model = ResNet(depth, 10, width).to(memory_format=torch.channels_last)
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
            shown, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), nowhere, nowhere
            try:
                runs = {
                    "ours": our_loop(copy.deepcopy(model), steps, Path(folder), signals),
                    "bare loop": bare_loop(model, steps),
                }
                figures = side_by_side(runs, options.repetitions)
            finally:
                sys.stdout, sys.stderr = shown
        results[case] = {
            "samples_per_second": figures,
            "ratios": {"ours / bare loop": ratio(figures, "ours", "bare loop")},
        }
    report("trainer: the whole loop, fp32, channels_last", results, options.json)


if __name__ == "__main__":
    main()
