#!/usr/bin/env python3
"""How often workers with local steps average in a whole run, by arithmetic; nothing is trained.

    python benchmarks/local_schedules.py

Prints a table in Markdown. The runs, on ImageNet with batches of 4,096 (312 steps per epoch), are
those of Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning" (2024),
arXiv:2310.14423: ViT-B with AdamW, 300 epochs, a warm-up of 10,000 steps and a peak learning rate
of 0.008; ResNet-152 with SGD, 200 epochs, a warm-up of 5 epochs and a peak of 0.8.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from utils.local.rules import SyncRule, default_alpha, simulate
from utils.optim.schedules import Schedule

EPOCH = 312  # steps


@dataclass(frozen=True)
class Case:
    """A run, and how it is printed.

    Args:
        run, rule_text: two cells of the table.
        rule: its `warmup_steps` and `peak_lr` are also those of the schedule.
        schedule: "cosine" or "linear", to 0.
    """

    run: str
    rule_text: str
    rule: SyncRule
    schedule: str = "cosine"

    def round_lengths(self) -> list[int]:
        rule = self.rule
        factor = Schedule(self.schedule, rule.total_steps, rule.warmup_steps).factor
        return simulate(rule, lambda step: rule.peak_lr * factor(step))


VIT = SyncRule("qsr", 300 * EPOCH, 4, 0.0175, peak_lr=0.008, warmup_steps=10_000)
RESNET = SyncRule("qsr", 200 * EPOCH, 2, 0.2, peak_lr=0.8, warmup_steps=5 * EPOCH)
VIT_COSINE, VIT_LINEAR, RESNET_COSINE = "ViT-B, cosine", "ViT-B, linear", "ResNet-152, cosine"
VIT_DEFAULT = default_alpha(VIT.peak_lr, 4, adaptive=True)
RESNET_DEFAULT = default_alpha(RESNET.peak_lr, 4, adaptive=False)
CASES = (
    Case(VIT_COSINE, "qsr, H_base 4, alpha 0.0175", VIT),
    Case(VIT_COSINE, "qsr, H_base 8, alpha 0.0175", replace(VIT, base=8)),
    Case(
        VIT_COSINE, f"qsr, H_base 4, default alpha ({VIT_DEFAULT:.4g})",
        replace(VIT, alpha=VIT_DEFAULT),
    ),
    Case(VIT_COSINE, "constant, H 4", replace(VIT, name="constant")),
    Case(
        VIT_COSINE, "post_local from half of the run on, H_base 4",
        replace(VIT, name="post_local", switch_step=VIT.total_steps // 2),
    ),
    Case(
        VIT_COSINE, "swap from nine tenths of the run on",
        replace(VIT, name="swap", switch_step=9 * VIT.total_steps // 10),
    ),
    Case(VIT_COSINE, "diloco, H 500", replace(VIT, name="diloco", base=500)),
    Case(VIT_LINEAR, "qsr, H_base 4, alpha 0.0175", VIT, "linear"),
    Case(VIT_LINEAR, "qsr, H_base 8, alpha 0.0175", replace(VIT, base=8), "linear"),
    Case(RESNET_COSINE, "qsr, H_base 2, alpha 0.2", RESNET),
    Case(RESNET_COSINE, "qsr, H_base 4, alpha 0.25", replace(RESNET, base=4, alpha=0.25)),
    Case(
        RESNET_COSINE, f"qsr, H_base 4, default alpha ({RESNET_DEFAULT:.4g})",
        replace(RESNET, base=4, alpha=RESNET_DEFAULT),
    ),
)  # fmt: skip


def table() -> list[str]:
    rows = ["| run | rule | averagings | of DDP's bytes | longest round, steps |"]
    rows.append("| --- | --- | ---: | ---: | ---: |")
    for case in CASES:
        lengths = case.round_lengths()
        share = 100 * len(lengths) / case.rule.total_steps
        rows.append(
            f"| {case.run} | {case.rule_text} | {len(lengths):,} | {share:.1f} % "
            f"| {max(lengths):,} |"
        )
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()
