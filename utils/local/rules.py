"""When workers that step by themselves average their parameters.

A round is the steps between two averagings; H is its length. H is chosen at the start of a round,
from the learning rate eta of its first step. The last round is cut to the steps that are left, so
that a run ends averaged.

Sources: Gu, Lyu, Arora, Zhang and Huang, "A Quadratic Synchronization Rule for Distributed Deep
Learning" (2024), arXiv:2310.14423 (qsr); Lin et al., "Don't Use Large Mini-Batches, Use Local SGD"
(2020), arXiv:1808.07217 (post_local); Gupta, Serrano and DeCoste, "Stochastic Weight Averaging in
Parallel" (2020), arXiv:2001.02312 (swap); Douillard et al., "DiLoCo" (2023), arXiv:2311.08105.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

POWERS = (1, 2, 3)
# (0.6 / 0.2) ** 2 is 8.999999999999996 in floating point.
ROUNDING = 1e-9
# alpha / (peak_lr * sqrt(H_base)), about that of the paper's runs of ViT-B with AdamW, and of
# ResNet-152 with SGD.
ADAPTIVE, SGD = 1.1, 0.17


def cut(length: int, left: int) -> int:
    """A round's length, at least 1, given how many steps are left."""
    return max(1, min(length, left))


def power_length(lr: float, left: int, *, alpha: float, base: int, power: float = 2) -> int:
    """max(1, min(max(base, floor((alpha / lr) ** power)), left)); the paper's rule for power 2.

    Args:
        lr: eta, of the round's first step, 0 or more; 0: all steps that are left.
        left: steps of the run that are left, the round's first included.
        alpha: in units of the learning rate; 0 or more.
        base: H_base, the shortest round.
        power: 1 or more.
    """
    # (alpha / lr) ** power could overflow, and is at least alpha / lr where that is at least 1.
    if alpha >= lr * left:
        return cut(left, left)
    return cut(max(base, math.floor((alpha / lr) ** power + ROUNDING)), left)


def default_alpha(peak_lr: float, base: int, *, adaptive: bool, power: int = 2) -> float:
    """c * peak_lr * base ** (1 / power), so that the rule means the same at any learning rate.

    c is 1.1 for adaptive optimizers and 0.17 for SGD: about what the paper's runs with power 2 have
    (ViT-B with AdamW: 1.09; ResNet-152 with SGD: 0.18 and 0.16). For other powers nothing was
    measured.

    Args:
        peak_lr: the highest learning rate of the schedule.
        base: H_base.
        adaptive: whether the size of the optimizer's steps does not depend on that of the gradient,
            as with AdamW and LAMB.
    """
    return (ADAPTIVE if adaptive else SGD) * peak_lr * base ** (1 / power)


@dataclass(frozen=True)
class SyncRule:
    """H of every round of a run.

    Args:
        name: "constant" and "diloco" (which has an outer optimizer, utils/local/optimizer.py):
            always `base`. "qsr": `power_length`; a round that begins in the warm-up has `init`
            steps.
            "post_local": 1 before `switch_step`, then `base`. "swap": 1 before `switch_step`, then
            all steps that are left.
        total_steps: of the run.
        base: steps; H_base, 1 or more. Without effect on "swap".
        alpha: above 0, in units of the learning rate; "qsr" only.
        power: one of POWERS; "qsr" only.
        peak_lr: above 0; "qsr" only.
        warmup_steps: of the learning rate; "qsr" only.
        init: steps of a round that begins in the warm-up; None: as many as it would have at the
            peak learning rate; "qsr" only.
        switch_step: the first step, from 0, that may begin a longer round; "post_local" and "swap".
    """

    name: str
    total_steps: int
    base: int = 1
    alpha: float = 0.0
    power: int = 2
    peak_lr: float = 0.0
    warmup_steps: int = 0
    switch_step: int = 0
    init: int | None = None

    def round_length(self, step: int, lr: float) -> int:
        """H of the round that begins with `step` (from 0), whose learning rate is `lr`."""
        left = self.total_steps - step
        if self.name == "qsr":
            if step < self.warmup_steps and self.init is not None:
                return cut(self.init, left)
            eta = self.peak_lr if step < self.warmup_steps else lr
            return power_length(eta, left, alpha=self.alpha, base=self.base, power=self.power)
        if self.name in ("post_local", "swap") and step < self.switch_step:
            return 1
        return cut(left if self.name == "swap" else self.base, left)


def simulate(rule: SyncRule, lr: Callable[[int], float]) -> list[int]:
    """H of each round of a run of `rule.total_steps` steps. In a round each worker sends as much as
    in a step of DDP: the parameters, and whatever is averaged of the optimizer's state on top.

    Args:
        lr: the learning rate of a step, from 0; called for the first step of each round.
    """
    lengths, step = [], 0
    while step < rule.total_steps:
        lengths.append(rule.round_length(step, lr(step)))
        step += lengths[-1]
    return lengths
