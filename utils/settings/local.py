"""Flags of local steps (`--strategy local`)."""

from dataclasses import dataclass
from functools import partial

from ..errors import UserError
from ..local.rules import ADAPTIVE, POWERS, SGD
from ..setting import setting
from .config import Config, refuse_beside

local_flag = partial(setting, group="local steps", resume="free")
BASE, OUTER_BASE = 4, 500  # default of --sync_base; that of diloco is its paper's
# --sync_rule -> the flags that have an effect with it.
RULE_FLAGS = {
    "qsr": ("sync_base", "qsr_alpha", "qsr_power", "sync_init"),
    "constant": ("sync_base",),
    "post_local": ("sync_base", "sync_from"),
    "swap": ("sync_from",),
    "diloco": ("sync_base", "outer_lr", "outer_momentum"),
}
OF_RULES = tuple(dict.fromkeys(name for names in RULE_FLAGS.values() for name in names))
OF_LOCAL = ("sync_rule", *OF_RULES, "optimizer_average", "local_workers", "bn_batches")


@dataclass
class LocalSettings(Config):
    sync_rule: str = local_flag(
        "qsr",
        "How many steps H the workers take between two averagings. qsr: H grows as the learning "
        "rate falls, max(--sync_base, (--qsr_alpha / learning rate) ** --qsr_power); constant: "
        "--sync_base; post_local: 1 until --sync_from, then --sync_base; swap: 1 until "
        "--sync_from, then all steps that are left; diloco: --sync_base, and an outer optimizer, "
        "SGD with Nesterov momentum, steps along the difference between two averagings",
        choices=tuple(RULE_FLAGS),
    )
    sync_base: int | None = local_flag(
        None,
        "H of constant, post_local and diloco, and the smallest H of qsr",
        low=1,
        unit="steps",
        default_text=f"{BASE}, with diloco {OUTER_BASE}",
    )
    qsr_alpha: float | None = local_flag(
        None,
        "alpha of qsr: H exceeds --sync_base when the learning rate is below alpha / "
        "--sync_base ** (1 / --qsr_power)",
        above=0,
        default_text=f"{SGD:g} * peak learning rate * --sync_base ** (1 / --qsr_power) with sgd, "
        f"{ADAPTIVE:g} * the same with optimizers whose steps do not grow with the gradient",
    )
    qsr_power: int = local_flag(2, "Power of qsr; 2 in the paper", choices=POWERS)
    sync_init: int | None = local_flag(
        None,
        "H of the rounds of qsr that begin in the warm-up",
        low=1,
        unit="steps",
        default_text="as at the peak learning rate",
    )
    sync_from: float | None = local_flag(
        None,
        "Epoch from which post_local and swap have longer rounds; fractions are allowed",
        low=0,
        unit="epochs",
        default_text="half of the run",
    )
    outer_lr: float = local_flag(0.7, "Learning rate of diloco's outer optimizer", above=0)
    outer_momentum: float = local_flag(
        0.9, "Nesterov momentum of diloco's outer optimizer", low=0, below=1
    )
    optimizer_average: bool = local_flag(
        False,
        "Average the optimizer's state, too, where it has a number for each element of a weight: "
        "momentum and Adam's moments; not NGD's Fisher matrices. Each averaged state adds as much "
        "traffic as the weights",
    )
    local_workers: int | None = local_flag(
        None,
        "Workers, each with --batch_size samples in a step; a process trains several in turn. "
        "A resumed run keeps their number, however many processes it has",
        low=1,
        unit="workers",
        default_text="as many as processes at the start",
    )
    bn_batches: int = local_flag(
        100,
        "Training micro-batches from which BatchNorm's statistics of the workers' mean are "
        "estimated before each evaluation and checkpoint; 0: the mean of the workers' statistics",
        low=0,
        unit="micro-batches",
    )

    @property
    def trains_locally(self) -> bool:
        return self.strategy == "local"

    @property
    def base_of_rounds(self) -> int:
        """--sync_base, or its default."""
        return self.sync_base or (OUTER_BASE if self.sync_rule == "diloco" else BASE)

    def ineffective(self):
        yield from super().ineffective()
        if not self.trains_locally:
            yield OF_LOCAL, "it belongs to --strategy local", "strategy"
            return
        others = tuple(name for name in OF_RULES if name not in RULE_FLAGS[self.sync_rule])
        yield others, f"--sync_rule {self.sync_rule} does not use it", "sync_rule"
        if self.optimizer == "sgd" and self.momentum == 0:
            yield "optimizer_average", "sgd without momentum has no state", "momentum"

    def _check_madgrad(self):
        # It draws the weights towards its start plus the sums of its gradients.
        if self.sync_rule == "diloco":
            raise UserError(
                "--optimizer madgrad undoes the outer steps of --sync_rule diloco: take another "
                "optimizer, or --momentum 0"
            )
        if not self.optimizer_average:
            raise UserError(
                "--optimizer madgrad undoes the averaging of --strategy local unless its sums are "
                "averaged, too: add --optimizer_average, or --momentum 0"
            )

    def validate(self):
        super().validate()
        if not self.trains_locally:
            return
        others = (
            ("--sync_bn", self.sync_bn, "workers do not communicate between two averagings"),
            ("--cuda_graphs", self.cuda_graphs == "on", "a graph cannot hold several workers"),
            ("--lookahead_k", self.lookahead_k is not None, "its slow weights are not averaged"),
            ("--auto_batch", self.auto_batch, "it does not count the memory of several workers"),
            (
                "--mixup meta",
                self.mixup == "meta",
                "what it learns would differ between the workers",
            ),
            (
                "--mixup auto",
                self.mixup == "auto",
                "it measures overfitting between two averagings, where the workers differ",
            ),
        )
        refuse_beside("--strategy local", others)
        if self.optimizer == "madgrad" and self.momentum != 0:
            self._check_madgrad()
        if self.sync_from is not None and self.sync_from > self.epochs:
            raise UserError(f"--sync_from {self.sync_from:g} is beyond --epochs {self.epochs}")
