#!/usr/bin/env python3
"""The whole training loop against a bare forward-backward-step loop over the same model.

    python benchmarks/trainer.py

The bare loop steps over ready-made batches with the same fused optimizer and does nothing else.
Ours also loads and augments, guards against numbers that are not finite, schedules, counts, logs at
the end of every run and draws its bar; a second one keeps a moving average of the weights. They
take turns every step (ResNet-50) or every 20 steps. All are float32, the ResNets with
channels_last, the Transformer on texts of equal length; evaluations and checkpoints are not timed.
"""

import copy
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side, silent
from benchmarks.loop import EPOCH, make_trainer, take_steps
from benchmarks.made_up import CPU, random_batch
from utils.data.texts.loader import TextLoader
from utils.launch.signals import Signals
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.models.vit import ViT
from utils.optim.factory import build_optimizer

BATCH = 64
RESNETS = {  # name -> (depth, width, steps of one run)
    "ResNet-50, batch 64": (50, 64, 1),
    "ResNet-18 of width 8, batch 64": (18, 8, 20),
}
VIT = "ViT of 6 layers of width 128, patches of 4, batch 64"
TEXTS, TOKENS, VOCABULARY, CLASSES = "Transformer of 2 layers of width 128, batch 64", 40, 8000, 4


def bare_loop(model, optimizer: str, batches: list, steps: int):
    """Over ready-made (inputs, targets), in turn."""
    optimizer = build_optimizer(optimizer, model, lr=0.01, weight_decay=5e-4)

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


def picture_batches() -> list:
    torch.manual_seed(0)
    return [(random_batch(BATCH), torch.randint(0, 10, (BATCH,))) for _ in range(4)]


def text_loader() -> TextLoader:
    """Random texts, all of TOKENS tokens, so that the steps of both loops do the same."""
    generator, count = np.random.default_rng(0), EPOCH * BATCH
    tokens = generator.integers(0, VOCABULARY, count * TOKENS).astype(np.uint16)
    return TextLoader(
        tokens,
        np.arange(count + 1) * TOKENS,
        generator.integers(0, CLASSES, count),
        batch_size=BATCH,
        max_len=TOKENS,
        device=CPU,
        shuffle=True,
    )


def compare(model, batches: list, steps: int, optimizer: str, repetitions: int, loader=None):
    signals = Signals()
    common = {"batch": BATCH, "optimizer": optimizer, "loader": loader}
    with tempfile.TemporaryDirectory() as folder, silent():

        def ours(name: str, **more) -> Callable[[], float]:
            own = copy.deepcopy(model)
            trainer = make_trainer(own, Path(folder, name), signals, **common, **more)
            return partial(take_steps, trainer, steps)

        runs = {
            "ours": ours("ours"),
            "bare loop": bare_loop(model, optimizer, batches, steps),
            "ours with an average": ours("ema", ema_decay=0.999),
        }
        figures = side_by_side(runs, repetitions)
    return {
        "samples_per_second": figures,
        "ratios": ratios(figures, ("ours", "bare loop"), ("ours with an average", "ours")),
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for case, (depth, width, steps) in RESNETS.items():
        model = ResNet(depth, 10, width).to(memory_format=torch.channels_last)
        results[case] = compare(model, picture_batches(), steps, "sgd", options.repetitions)
    model = ViT(layers=6, dim=128, heads=4, ffn=256)
    results[VIT] = compare(model, picture_batches(), 2, "adamw", options.repetitions)
    model = Transformer(
        VOCABULARY, CLASSES, layers=2, dim=128, heads=4, ffn=256, max_len=TOKENS, dropout=0.1
    )
    loader = text_loader()
    batches = [(b.inputs, b.targets) for b in itertools.islice(loader.epoch(0), 4)]
    results[TEXTS] = compare(model, batches, 20, "adamw", options.repetitions, loader)
    report("trainer: the whole loop, fp32", results, options.json)


if __name__ == "__main__":
    main()
