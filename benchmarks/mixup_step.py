#!/usr/bin/env python3
"""What mixing costs: the whole training loop with mixup, CutMix, meta-mixup and without.

    python benchmarks/mixup_step.py
    python benchmarks/mixup_step.py --only hypergradient

`training`: the entries' trainer with its loader, a ResNet-18 of width 8 over pictures of 32x32,
float32 and channels_last, in turn; a turn is --meta_every steps, and so contains one update of
meta-mixup's policy. `per step` is a ratio of times.

`hypergradient`: one update of the policy, by a finite difference along the real gradient, and
exactly, by double backward, on the same samples; how much the two differ; and the first with the
gradient of the virtual step computed anew.
"""

import copy
import dataclasses
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratio, report, side_by_side, silent
from benchmarks.loop import make_trainer, take_steps
from benchmarks.made_up import random_batch
from utils.launch.signals import Signals
from utils.mixup.meta import Pairs, PolicyMixup, VirtualStep
from utils.mixup.mixing import Mixing
from utils.mixup.policy import MixupPolicy
from utils.models.resnet import ResNet
from utils.settings.mixing import MixingSettings
from utils.training.objective import Classification, mixed_cross_entropy
from utils.training.train_step import TrainStep

NAME, DEPTH, WIDTH, CLASSES = "ResNet-18 of width 8", 18, 8, 10
EVERY, SIZE = MixingSettings.meta_every, MixingSettings.meta_batch
LR = 0.01


def network() -> ResNet:
    torch.manual_seed(0)
    return ResNet(DEPTH, CLASSES, WIDTH).to(memory_format=torch.channels_last)


def with_mixing(trainer, mixing: Mixing, meta: PolicyMixup | None = None):
    """The same trainer, its batches mixed."""
    steps = trainer.steps
    trainer.loader.mixing = mixing
    mixed = Classification(steps.model, steps.precision, counts_mixing=True)
    trainer.steps = TrainStep(dataclasses.replace(steps.parts, objective=mixed, meta=meta))
    return trainer


def measure_training(batch: int, repetitions: int) -> dict:
    model, signals = network(), Signals()
    mixing = partial(Mixing, block=batch, height=32, width=32)
    learned = {
        "meta_form": "policy",
        "per_sample": True,
        "clean_samples": SIZE,
        "update_every": EVERY,
    }
    with tempfile.TemporaryDirectory() as folder, silent():

        def trainer(name: str):
            return make_trainer(copy.deepcopy(model), Path(folder, name), signals, batch=batch)

        meta = trainer("meta")
        policy = PolicyMixup(
            MixupPolicy(CLASSES, MixingSettings.alpha, 0.05),
            VirtualStep(meta.steps.model, mixed_cross_entropy),
        )
        trainers = {
            "none": trainer("none"),
            "mixup": with_mixing(trainer("mixup"), mixing(alpha=0.2)),
            "cutmix": with_mixing(trainer("cutmix"), mixing(cutmix_alpha=1.0)),
            "meta-mixup": with_mixing(meta, mixing(alpha=0.2, **learned), policy),
        }
        runs = {name: partial(take_steps, one, EVERY) for name, one in trainers.items()}
        figures = side_by_side(runs, repetitions)
    pairs = [("mixup", "none"), ("cutmix", "none"), ("meta-mixup", "mixup")]
    return {
        "samples_per_second": figures,
        # Of times, so the speeds are divided the other way round.
        "ratios": {f"per step: {a} / {b}": ratio(figures, b, a) for a, b in pairs},
    }


def measure_hypergradient(repetitions: int) -> dict:
    model = network()
    own, other, clean = (random_batch(SIZE) for _ in range(3))
    targets, partners, clean_targets = (torch.randint(0, CLASSES, (SIZE,)) for _ in range(3))
    lam = 0.5 + 0.5 * torch.rand(SIZE)
    pairs, clean = Pairs(own, other, targets, partners, lam), (clean, clean_targets)
    logits = model(torch.lerp(other, own, lam[:, None, None, None]))
    mixed_cross_entropy(logits, targets, partners, lam).mean().backward()

    def anew(exact: bool):
        virtual = VirtualStep(model, mixed_cross_entropy, exact=exact)
        return virtual.batch_hypergradient(pairs, pairs.lam, clean, LR)

    def fast():
        virtual = VirtualStep(model, mixed_cross_entropy)
        return virtual.step_hypergradients([pairs], [pairs.lam], SIZE, clean, LR)[0]

    ways = {
        "fast": fast,
        "fast, gradient computed anew": partial(anew, False),
        "exact": partial(anew, True),
    }
    exact = ways["exact"]()
    for name, way in ways.items():
        found = way()
        cosine = F.cosine_similarity(found, exact, dim=0).item()
        difference = ((found - exact).norm() / exact.norm()).item()
        print(f"{name}: cosine to the exact one {cosine:.6f}, relative difference {difference:.1e}")

    def speed(way) -> float:
        started = time.perf_counter()
        way()
        return 1 / (time.perf_counter() - started)

    figures = side_by_side({name: partial(speed, way) for name, way in ways.items()}, repetitions)
    others = [name for name in ways if name != "exact"]
    return {
        "steps_per_second": figures,
        "ratios": {f"time: {name} / exact": ratio(figures, "exact", name) for name in others},
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--only", choices=("training", "hypergradient"), help="(default: both)")
    flags.add_argument("--batch", type=int, default=128, help="of `training` (default: 128)")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    if options.only != "hypergradient":
        case = f"{NAME}, batch {options.batch}, a policy every {EVERY} steps of {SIZE}"
        results[case] = measure_training(options.batch, options.repetitions)
    if options.only != "training":
        case = f"{NAME}, hypergradient of {SIZE} pairs on {SIZE} clean samples"
        results[case] = measure_hypergradient(options.repetitions)
    report("mixup: what it costs, fp32, channels_last", results, options.json)


if __name__ == "__main__":
    main()
