#!/usr/bin/env python3
"""What mixing costs: the whole training loop with mixup, meta-mixup and without either.

    python benchmarks/mixup_step.py
    python benchmarks/mixup_step.py --only hypergradient

`training`: the trainer of the entries with its loader, over pictures of 32x32, float32 and
channels_last. They take turns; one turn is a multiple of --meta_every steps, so that meta-mixup's
has its updates in it. `per step` is the time with the first over the time with the second.

`hypergradient`: one update of the policy, by a finite difference along the real gradient, and
exactly, by double backward, on the same samples; how much the two differ; and both with the
virtual step's gradient taken anew.
"""

import copy
import functools
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratio, report, side_by_side, silent
from benchmarks.loop import make_trainer, take_steps
from utils.launch.signals import Signals
from utils.mixup.meta import Pairs, PolicyMixup, VirtualStep
from utils.mixup.mixing import Mixing
from utils.mixup.policy import MixupPolicy
from utils.models.resnet import ResNet
from utils.settings.mixing import MixingSettings
from utils.training.objective import Classification, mixed_cross_entropy

CASES = {  # name -> (depth, width)
    "ResNet-18 of width 8": (18, 8),
    "ResNet-50": (50, 64),
}
CLASSES = 10


def with_mixing(trainer, mixing: Mixing, meta: PolicyMixup | None = None):
    """The same trainer, its batches mixed."""
    trainer.loader.mixing, trainer.meta = mixing, meta
    mixed = Classification(trainer.model, trainer.precision, mixing=True)
    size = len(mixed.sums)
    trainer.objective = mixed
    trainer.step_sums, trainer.window = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
    trainer.sum_names = mixed.sums
    trainer.progress.epoch_sums = [0.0] * size
    return trainer


def measure_training(options) -> dict:
    results, signals = {}, Signals()
    every, size = MixingSettings.meta_every, MixingSettings.meta_batch
    for case in options.cases:
        depth, width = CASES[case]
        model = ResNet(depth, CLASSES, width).to(memory_format=torch.channels_last)
        with tempfile.TemporaryDirectory() as folder, silent():

            def trainer(name: str, model=model, folder=folder):
                of_its_own = copy.deepcopy(model)
                return make_trainer(of_its_own, Path(folder, name), signals, batch=options.batch)

            common = {"block": options.batch, "height": 32, "width": 32}
            meta = trainer("meta")
            policy = PolicyMixup(
                MixupPolicy(CLASSES, MixingSettings.alpha, 0.05),
                VirtualStep(meta.model, mixed_cross_entropy),
            )
            learned = {"learned": "policy", "per_sample": True, "clean": size}
            trainers = {
                "none": trainer("none"),
                "mixup": with_mixing(trainer("mixup"), Mixing(alpha=0.2, **common)),
                "cutmix": with_mixing(trainer("cutmix"), Mixing(cutmix_alpha=1.0, **common)),
                "meta-mixup": with_mixing(
                    meta, Mixing(alpha=0.2, clean_every=every, **learned, **common), policy
                ),
            }
            steps = every * options.periods
            runs = {name: functools.partial(take_steps, t, steps) for name, t in trainers.items()}
            figures = side_by_side(runs, options.repetitions)
        pairs = [("mixup", "none"), ("cutmix", "none"), ("meta-mixup", "mixup")]
        results[f"{case}, batch {options.batch}, a policy every {every} steps of {size}"] = {
            "samples_per_second": figures,
            # Speeds: the slower one below.
            "ratios": {f"per step: {a} / {b}": ratio(figures, b, a) for a, b in pairs},
        }
    return results


def measure_hypergradient(options) -> dict:
    results, size = {}, MixingSettings.meta_batch
    for case in options.cases:
        depth, width = CASES[case]
        torch.manual_seed(0)
        model = ResNet(depth, CLASSES, width).to(memory_format=torch.channels_last)
        own, other, clean = (
            torch.randn(size, 3, 32, 32).to(memory_format=torch.channels_last) for _ in range(3)
        )
        targets, partners, clean_targets = (torch.randint(0, CLASSES, (size,)) for _ in range(3))
        lam = 0.5 + 0.5 * torch.rand(size)
        pairs = Pairs(own, other, targets, partners, lam)
        mixed = torch.lerp(other, own, lam[:, None, None, None])
        logits = model(mixed)
        mixed_cross_entropy(logits, targets, partners, lam).mean().backward()

        def hypergradient(
            exact: bool, known: bool, model=model, pairs=pairs, clean=(clean, clean_targets)
        ):
            virtual = VirtualStep(model, mixed_cross_entropy, exact=exact)
            if known:
                return virtual.of_step([pairs], [pairs.lam], size, clean, 0.01)[0]
            return virtual.of_batch(pairs, pairs.lam, clean, 0.01)

        ways = {
            "fast": functools.partial(hypergradient, False, True),
            "fast, gradient taken anew": functools.partial(hypergradient, False, False),
            "exact": functools.partial(hypergradient, True, False),
        }
        exact = ways["exact"]()
        for name, way in ways.items():
            found = way()
            print(
                f"{case}, {name}: cosine to the exact one "
                f"{F.cosine_similarity(found, exact, dim=0).item():.6f}, relative difference "
                f"{((found - exact).norm() / exact.norm()).item():.1e}"
            )

        def speed(way) -> float:
            started = time.perf_counter()
            way()
            return 1 / (time.perf_counter() - started)

        figures = side_by_side(
            {name: functools.partial(speed, way) for name, way in ways.items()}, options.repetitions
        )
        others = [name for name in ways if name != "exact"]
        results[f"{case}, hypergradient of {size} pairs on {size} clean samples"] = {
            "steps_per_second": figures,
            "ratios": {f"time: {name} / exact": ratio(figures, "exact", name) for name in others},
        }
    return results


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--only", choices=("training", "hypergradient"), help="(default: both)")
    words.add_argument("--batch", type=int, default=128, help="of `training` (default: 128)")
    words.add_argument("--periods", type=int, default=1, help="updates in a turn (default: 1)")
    words.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[:1])
    options = words.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    if options.only != "hypergradient":
        results |= measure_training(options)
    if options.only != "training":
        results |= measure_hypergradient(options)
    report("mixup: what it costs, fp32, channels_last", results, options.json)


if __name__ == "__main__":
    main()
